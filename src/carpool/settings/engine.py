"""The settings of an engine: of a model's weights, of batching, and of the limits of requests."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_type_hints

from carpool.settings import preparation
from carpool.settings.batching_mode import BatchingMode
from carpool.settings.rules import check, parse_bytes, setting, streamed_names

LoraBatching = Literal["mixed", "grouped"]
Numerics = Literal["fast", "exact"]
ConditioningSharing = Literal["per-key", "shared"]
IsolationMode = Literal["auto", "shared", "private"]
ContextParallelKind = Literal["ulysses", "ring"]
DEVICES = ("cpu", "cuda", "xpu", "mps")
MetricsFormat = Literal["current", "docs"]
OF_FILES = ("dtype", "revision", "variant", "model_config", "component", "quantize", "embeddings")
"""Settings that say how a model is read: a pipeline that is there already has been."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine, beside the model."""

    device: str = setting(
        "auto",
        "cpu, cuda (also for ROCm), xpu, mps, or cuda:N; auto takes the accelerator, if any. With "
        "context_parallel one of each process may be said, as cuda:0+cuda:1",
    )
    dtype: str = setting(
        "auto",
        "weights' type, [COMPONENT=]auto|float32|bfloat16|float16, as in bfloat16,vae=float32; "
        "auto is float32 on a CPU, else bfloat16",
        listed=True,
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub model")
    variant: str | None = setting(
        None, "variant of the weight files, such as fp16 for NAME.fp16.safetensors"
    )
    model_config: str | None = setting(
        None,
        "folder or hub id of a pipeline that has all but the weights in MODEL, where MODEL is one "
        "file; default: the hub id that diffusers infers from the file",
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
        None, "COMPONENT=DEVICE of components that are on another device than the rest", listed=True
    )
    context_parallel: int = setting(
        1,
        "devices that compute each forward of the denoiser together, each a part of its sequence "
        "(diffusers' context parallelism); a worker is then so many processes",
        least=1,
        most=64,
    )
    context_parallel_kind: ContextParallelKind = setting(
        "ulysses",
        "how they share attention: ulysses exchanges heads; ring passes keys and values on, which "
        "takes less memory, and on GPUs an --attention-backend such as flash",
    )
    compile: bool = setting(
        False, "compile the repeated blocks of denoisers (torch.compile), before the first request"
    )
    attention_backend: str | None = setting(
        None,
        "how denoisers compute attention, by diffusers' names: native, flash, sage and more",
    )
    sparse_attention: float | None = setting(
        None,
        "share of blocks of tokens that each block attends to in models with sparse attention; "
        "default: the model's own (FastWan 0.2, TurboWan 0.1)",
        least=0.001,
        most=1.0,
    )
    vae_tiling: bool = setting(
        False, "encode and decode large pictures tile by tile: less memory, faint seams"
    )
    warmup: str | None = setting(
        None,
        "sizes that are run once before the first request, as in 1024x1024,512x512, or default for "
        "the model's own; with --compile: default",
        listed=True,
    )
    threads: int | None = setting(
        None,
        "CPU threads of a forward; default: 1 below 500 million weights, else all cores",
        least=1,
    )
    memory: str | None = setting(
        None,
        "what weights may take on the device, such as 20GiB; the rest is streamed. Default: four "
        "fifths of what an accelerator has, no limit on a CPU",
    )
    stream: str = setting(
        "auto",
        "components whose blocks are streamed to the device, by commas, such as "
        "transformer,text_encoder; auto: as many blocks as do not fit; none: refuse a model that "
        "does not fit. See docs/streaming.md",
    )
    stream_dir: str | None = setting(
        None,
        "folder on the disk to stream from; default: host memory for an accelerator, while there "
        "is enough, else the user's cache folder",
    )
    batching_mode: BatchingMode = setting(
        "continuous",
        "continuous forms batches anew at every step; dynamic and request batch whole "
        "requests at admission, as SGLang-Diffusion and vLLM-Omni do; off runs one at a time. A "
        "setting of dynamic or request chooses its mode",
    )
    min_gain: float = setting(
        0.05,
        "continuous: add a row to a forward if throughput grows by at least this fraction; less "
        "while many requests wait",
        least=0,
    )
    cost_table: str | None = setting(
        None, "file of what forwards take, as learned; default: one in the user's cache folder"
    )
    fair_share: tuple[str, ...] = setting(
        (),
        "continuous: TENANT=WEIGHT, '*' for all others; repeatable; default: equal shares of API "
        "keys, and none without keys. A tenant is an API key's name, or without keys what requests "
        "say as `user`",
    )
    admit_late: bool = setting(
        False, "accept requests whose deadline_s cannot be met, with a warning in the log"
    )
    batching_max_size: int = setting(1, "dynamic: largest batch; 1 is off", "outputs", least=1)
    batching_delay_ms: float = setting(
        0.0,
        "dynamic: longest wait of the first request for its batch to fill",
        "ms",
        least=0,
        finite=True,
    )
    batching_config: str | None = setting(None, "dynamic: JSON file of rules that cap batches")
    enable_batching_metrics: bool = setting(False, "dynamic: log a line for every batch")
    batching_metrics_format: MetricsFormat = setting(
        "current",
        "dynamic: form of those lines: current as SGLang-Diffusion 0.5.23 prints them, docs as its "
        "page about batching shows them",
    )
    max_num_seqs: int = setting(1, "request: largest wave", "requests", least=1)
    request_batch_max_wait_ms: float = setting(
        0.0, "request: longest wait for a wave to fill", "ms", least=0, finite=True
    )
    default_sampling_params: str | None = setting(
        None,
        "JSON of parameters that requests get where they leave them out, such as "
        "'{\"num_inference_steps\": 20}'",
    )
    numerics: Numerics = setting(
        "fast",
        "fast: a fused forward may differ from one alone in its last bits; exact: the same bits "
        "in any batch, at some cost: see docs/numerics.md",
    )
    isolation: IsolationMode = setting(
        "auto",
        "how requests are kept apart: shared interleaves them, each on a view of the pipeline; "
        "private runs each alone on the pipeline itself, from its start to its end, as plain "
        "diffusers would; auto is shared, and private for code of yours that can reach what other "
        "requests see, or that changes a module or a switch of the process",
    )
    infer_specs: bool = setting(
        True,
        "batch calls of model classes that Carpool does not know, once their first batches gave "
        "the same bits as single requests; false: requests run one at a time through them",
    )
    lora: tuple[str, ...] = setting((), "an adapter: NAME=PATH or NAME=PATH@MODULE; repeatable")
    lora_dir: str | None = setting(
        None, "folder, with its sub-folders, of adapters (.safetensors); read again on SIGHUP"
    )
    embeddings: str | None = setting(
        None,
        "folder, with its sub-folders, of embeddings (textual inversion): each file is a word of "
        "its name in prompts",
    )
    lora_batching: LoraBatching = setting(
        "mixed", "mixed: requests with different adapters share forwards; grouped: they do not"
    )
    rewriter: str | None = setting(
        None,
        "a causal language model, by folder or hub id, that writes prompts anew for requests with "
        "enhance_prompt; default: the pipeline's own way, if it has one",
    )
    language_url: str | None = setting(
        None,
        "another server, such as http://HOST:8000, that writes prompts anew by "
        "/v1/chat/completions, or GLM-Image's plans by SGLang's /generate; its key is in "
        "CARPOOL_LANGUAGE_KEY",
    )
    language_model: str | None = setting(
        None, "name of the model at language_url; default: the first that it lists"
    )
    language_timeout: float = setting(
        60.0, "longest wait for an answer of language_url", unit="s", least=0.1, finite=True
    )
    enhance_prompt: bool = setting(
        False, "write prompts anew for requests that do not say enhance_prompt"
    )
    max_batch_size: int = setting(
        8,
        "continuous: most rows in one forward; the other modes have caps of their own",
        unit="rows",
        least=1,
    )
    max_decode_size: int = setting(4, "most rows in one VAE decode", unit="rows", least=1)
    max_decode_gib: float = setting(
        8.0, "most memory that a batched VAE decode may take", unit="GiB", least=0.0
    )
    max_running: int = setting(32, "most requests that run at the same time", least=1)
    max_queue: int = setting(1024, "most requests that wait in the queue", least=0)
    max_wait: float = setting(
        600.0,
        "refuse new requests when the queue holds more than this many seconds of work; previews "
        "stop at half of it, requests of priority below 0 are refused at four fifths",
        unit="s",
        least=0.1,
        finite=True,
    )
    max_pixels: int = setting(
        2048 * 2048, "largest picture that a request draws, or has encoded", unit="pixels", least=1
    )
    max_steps: int = setting(1000, "most denoising steps of a request", least=1)
    step_cache: float = setting(
        0.0,
        "let requests that do not say it skip steps while the predicted relative change of the "
        "denoiser's answer is below this; 0 runs every step",
        least=0,
        most=1,
    )

    conditioning_cache: float | None = setting(
        None,
        "memory for what encoders gave, which answers equal calls of later requests; 0 keeps "
        "nothing; default: 512, or a fiftieth of the device's memory if that is less",
        unit="MiB",
        least=0,
        finite=True,
    )
    conditioning_sharing: ConditioningSharing = setting(
        "per-key",
        "who shares these answers: per-key: requests of one API key; shared: all, whose times then "
        "tell whether somebody has used the same prompt",
    )

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            check(field.name, getattr(self, field.name), hints[field.name], field.metadata)
        preparation.check_form(self)
        if self.memory is not None:
            parse_bytes("memory", self.memory)
        preparation.check_streamed(self, streamed_names(self.stream) or ())
