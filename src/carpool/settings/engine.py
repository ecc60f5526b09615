"""The settings of an engine: weights, batching, limits of requests."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal, get_type_hints

from carpool.settings import preparation
from carpool.settings.rules import FINITE, Meta, Positive, check, setting

BatchingMode = Literal["continuous", "dynamic", "request", "off"]
LoraBatching = Literal["mixed", "grouped"]
Numerics = Literal["fast", "exact"]
ConditioningSharing = Literal["per-key", "shared"]
IsolationMode = Literal["auto", "shared", "private"]
ContextParallelKind = Literal["ulysses", "ring"]
DEVICES = ("cpu", "cuda", "xpu", "mps")
NotNegative = Annotated[float, Meta(ge=0, le=FINITE)]
MetricsFormat = Literal["current", "docs"]
OF_FILES = ("dtype", "revision", "variant", "model_config", "component", "quantize", "embeddings")
"""Settings about loading a model, without effect on a loaded pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine, without the model."""

    device: str = setting(
        "auto",
        "cpu, cuda (also for ROCm), xpu, mps, or cuda:N; auto takes the accelerator, if any. With "
        "context_parallel: optionally a device for each process, as cuda:0+cuda:1",
    )
    dtype: str = setting(
        "auto",
        "type of weights, [COMPONENT=]auto|float32|bfloat16|float16, as in bfloat16,vae=float32; "
        "auto is float32 on a CPU, otherwise bfloat16",
        listed=True,
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub model")
    variant: str | None = setting(
        None, "variant of the weight files, such as fp16 for NAME.fp16.safetensors"
    )
    model_config: str | None = setting(
        None,
        "folder or hub id of the pipeline that a MODEL of a single file belongs to, for the other "
        "components; default: the hub id that diffusers infers from the file",
    )
    component: tuple[str, ...] = setting(
        (),
        "NAME=FILE_OR_MODEL: another transformer, VAE or text encoder: a .safetensors or .gguf "
        "file, a folder or a hub id; repeatable",
    )
    quantize: str | None = setting(
        None,
        "[COMPONENT=]KIND of quantized weights, as in transformer=int8,text_encoder_2=nf4; without "
        "COMPONENT: denoisers. KIND is "
        "int8, int8-dynamic, int4, fp8, fp8-dynamic, nf4, fp4, llm-int8, quanto-int8, quanto-int4 "
        'or quanto-fp8. Or JSON by component: {NAME: {"quant_backend": ..., ...}}',
        listed=True,
    )
    place: str | None = setting(
        None, "COMPONENT=DEVICE for components on a different device than the rest", listed=True
    )
    context_parallel: Annotated[int, Meta(ge=1, le=64)] = setting(
        1,
        "number of devices that share each forward of the denoiser, each with a part of its "
        "sequence (diffusers' context parallelism); a worker then has this many processes",
    )
    context_parallel_kind: ContextParallelKind = setting(
        "ulysses",
        "how these devices share attention: ulysses exchanges heads; ring passes keys and values "
        "on, takes less memory, and on GPUs needs an --attention-backend such as flash",
    )
    compile: bool = setting(
        False, "compile the repeated blocks of denoisers (torch.compile), before the first request"
    )
    attention_backend: str | None = setting(
        None, "attention backend of denoisers, by diffusers' names: native, flash, sage and more"
    )
    sparse_attention: Annotated[float, Meta(ge=0.001, le=1.0)] | None = setting(
        None,
        "fraction of token blocks that each block attends to in models with sparse attention; "
        "default: the model's own (FastWan 0.2, TurboWan 0.1)",
    )
    vae_tiling: bool = setting(
        False, "encode and decode large pictures tile by tile: less memory, faint seams"
    )
    warmup: str | None = setting(
        None,
        "sizes to run once before the first request, as in 1024x1024,512x512, or default for "
        "the model's own; with --compile: default",
        listed=True,
    )
    threads: Positive | None = setting(
        None, "CPU threads of a forward; default: 1 below 500 million weights, otherwise all cores"
    )
    memory: str | None = setting(
        None,
        "most device memory for weights, such as 20GiB; the rest is streamed. Default: four "
        "fifths of an accelerator's memory, no limit on a CPU",
    )
    stream: str = setting(
        "auto",
        "components whose blocks are streamed to the device, separated by commas, such as "
        "transformer,text_encoder; auto: the blocks that do not fit; none: refuse a model that "
        "does not fit. See docs/streaming.md",
    )
    stream_dir: str | None = setting(
        None,
        "folder on the disk to stream from; default: host memory for an accelerator, if there "
        "is enough, otherwise the user's cache folder",
    )
    batching_mode: BatchingMode = setting(
        "continuous",
        "continuous: new batches at every step; dynamic and request batch whole "
        "requests at admission, as SGLang-Diffusion and vLLM-Omni do; off runs one at a time. A "
        "setting of dynamic or request selects its mode",
    )
    min_gain: Annotated[float, Meta(ge=0)] = setting(
        0.05,
        "continuous: add a row to a forward if throughput grows by at least this fraction; lower "
        "while many requests wait",
    )
    cost_table: str | None = setting(
        None, "file of learned forward costs; default: a file in the user's cache folder"
    )
    fair_share: tuple[str, ...] = setting(
        (),
        "continuous: TENANT=WEIGHT, '*' for all others; repeatable; default: equal shares of API "
        "keys, and none without keys. A tenant is an API key's name, or without keys the `user` of "
        "requests",
    )
    admit_late: bool = setting(
        False, "accept requests whose deadline_s cannot be met, with a warning in the log"
    )
    batching_max_size: Positive = setting(1, "dynamic: largest batch; 1 is off", "outputs")
    batching_delay_ms: NotNegative = setting(
        0.0, "dynamic: longest wait of the first request for its batch to fill", "ms"
    )
    batching_config: str | None = setting(None, "dynamic: JSON file of rules that cap batches")
    enable_batching_metrics: bool = setting(False, "dynamic: log a line for every batch")
    batching_metrics_format: MetricsFormat = setting(
        "current",
        "dynamic: format of those lines: current as SGLang-Diffusion 0.5.23 prints them, docs as "
        "its page about batching shows them",
    )
    max_num_seqs: Positive = setting(1, "request: largest wave", "requests")
    request_batch_max_wait_ms: NotNegative = setting(
        0.0, "request: longest wait for a wave to fill", "ms"
    )
    default_sampling_params: str | None = setting(
        None,
        "JSON with default values of request parameters, such as '{\"num_inference_steps\": 20}'",
    )
    numerics: Numerics = setting(
        "fast",
        "fast: a fused forward may differ from a single one in its last bits; exact: the same bits "
        "in any batch, but slower: see docs/numerics.md",
    )
    isolation: IsolationMode = setting(
        "auto",
        "isolation of requests: shared interleaves them, each on a view of the pipeline; "
        "private runs each alone on the pipeline itself, from its start to its end, as plain "
        "diffusers would; auto is shared, but private for custom code that can reach the state of "
        "other requests, or that changes a module or a switch of the process",
    )
    infer_specs: bool = setting(
        True,
        "batch calls of unknown model classes, after their first batches gave the same bits as "
        "single requests; false: unknown classes run requests one at a time",
    )
    lora: tuple[str, ...] = setting((), "an adapter: NAME=PATH or NAME=PATH@MODULE; repeatable")
    lora_dir: str | None = setting(
        None, "folder, with its sub-folders, of adapters (.safetensors); read again on SIGHUP"
    )
    embeddings: str | None = setting(
        None,
        "folder, with its sub-folders, of embeddings (textual inversion): the name of each file is "
        "a word in prompts",
    )
    lora_batching: LoraBatching = setting(
        "mixed", "mixed: requests with different adapters share forwards; grouped: they do not"
    )
    rewriter: str | None = setting(
        None,
        "folder or hub id of a causal language model that rewrites prompts for requests with "
        "enhance_prompt; default: the pipeline's own rewriter, if any",
    )
    language_url: str | None = setting(
        None,
        "another server, such as http://HOST:8000, that rewrites prompts by "
        "/v1/chat/completions, or writes GLM-Image's plans by SGLang's /generate; its key is in "
        "CARPOOL_LANGUAGE_KEY",
    )
    language_model: str | None = setting(None, "model at language_url; default: the first it lists")
    language_timeout: Annotated[float, Meta(ge=0.1, le=FINITE)] = setting(
        60.0, "longest wait for an answer of language_url", "s"
    )
    enhance_prompt: bool = setting(False, "rewrite the prompts of requests without enhance_prompt")
    max_batch_size: Positive = setting(
        8, "continuous: most rows in one forward; the other modes have caps of their own", "rows"
    )
    max_decode_size: Positive = setting(4, "most rows in one VAE decode", "rows")
    max_decode_gib: Annotated[float, Meta(ge=0.0)] = setting(
        8.0, "most memory that a batched VAE decode may take", "GiB"
    )
    max_running: Positive = setting(32, "most requests that run at the same time")
    max_queue: Annotated[int, Meta(ge=0)] = setting(1024, "most requests that wait in the queue")
    max_wait: Annotated[float, Meta(ge=0.1, le=FINITE)] = setting(
        600.0,
        "refuse new requests when the queue holds more than this many seconds of work; previews "
        "stop at half of it, requests of priority below 0 are refused at four fifths",
        "s",
    )
    max_pixels: Positive = setting(
        2048 * 2048, "largest picture that a request draws or encodes", "pixels"
    )
    max_steps: Positive = setting(1000, "most denoising steps of a request")
    step_cache: Annotated[float, Meta(ge=0, le=1)] = setting(
        0.0,
        "default step_cache of requests: skip steps while the predicted relative change of the "
        "denoiser's output is below this; 0 runs every step",
    )
    conditioning_cache: NotNegative | None = setting(
        None,
        "memory for outputs of encoders, which answer equal calls of later requests; 0 keeps "
        "nothing; default: 512, or a fiftieth of the device's memory if that is less",
        "MiB",
    )
    conditioning_sharing: ConditioningSharing = setting(
        "per-key",
        "sharing of these outputs: per-key: within an API key; shared: between all, so response "
        "times reveal whether another client used the same prompt",
    )

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            check(field.name, getattr(self, field.name), hints[field.name])
        preparation.check_form(self)
