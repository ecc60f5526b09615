"""Every setting, once: its name, default, unit, rule and help.

`carpool.load(MODEL, **settings)` takes those of `EngineSettings` and of `JOBS`; `carpool serve`
takes those of `ServeSettings` as flags (`max_queue` is `--max-queue`) and from the environment
(`CARPOOL_MAX_QUEUE`). A flag wins over the environment, the environment over the default.
Nothing here knows what a setting does.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Self, get_type_hints

from carpool import preparation
from carpool.batching_mode import BatchingMode as BatchingMode
from carpool.batching_mode import with_chosen_mode
from carpool.errors import SettingRejected, nearest
from carpool.scale_settings import ScaleSettings
from carpool.setting_rules import check, parse, parse_bytes, setting, streamed_names

ENV_PREFIX = "CARPOOL_"
FAULT_VARIABLE = "CARPOOL_FAULT"
"""A test hook and no setting; see `carpool.engine.faults`."""
FORKSERVER_VARIABLE = "CARPOOL_FORKSERVER"
"""`off`, or where a fork server listens; see `carpool.worker.start`."""

_NO_SETTINGS = {FAULT_VARIABLE, FORKSERVER_VARIABLE}

LoraBatching = Literal["mixed", "grouped"]
Journalling = Literal["off", "memory", "jobs", "all"]
Numerics = Literal["fast", "exact"]
ContextParallelKind = Literal["ulysses", "ring"]
DEVICES = ("cpu", "cuda", "xpu", "mps")
DType = Literal["auto", "float32", "bfloat16", "float16"]  # of all components
MetricsFormat = Literal["current", "docs"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine needs to know, beside the model."""

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
        "COMPONENT: denoisers. KIND is int8, int8-dynamic, int4, fp8, fp8-dynamic, nf4, fp4, "
        "llm-int8, quanto-int8, quanto-int4 "
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
        "continuous: TENANT=WEIGHT, '*' for all others; repeatable; none: no shares. A tenant is "
        "an API key's name, or without keys what requests say as `user`",
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
        "in any company, at some cost: see docs/numerics.md",
    )
    infer_specs: bool = setting(
        True,
        "batch calls of model classes that Carpool does not know, once their first batches gave "
        "the same bits as single requests; false: requests run one at a time through them",
    )
    lora: tuple[str, ...] = setting((), "NAME=PATH of an adapter (.safetensors); repeatable")
    lora_dir: str | None = setting(
        None, "folder whose .safetensors files are adapters by their names; read again on SIGHUP"
    )
    lora_batching: LoraBatching = setting(
        "mixed", "mixed: requests with different adapters share forwards; grouped: they do not"
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
    max_pixels: int = setting(2048 * 2048, "largest picture of a request", unit="pixels", least=1)
    max_steps: int = setting(1000, "most denoising steps of a request", least=1)
    step_cache: float = setting(
        0.0,
        "let requests that do not say it skip steps while the predicted relative change of the "
        "denoiser's answer is below this; 0 runs every step",
        least=0,
        most=1,
    )

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            check(field.name, getattr(self, field.name), hints[field.name], field.metadata)
        preparation.check_form(self)
        if self.memory is not None:
            parse_bytes("memory", self.memory)
        preparation.check_streamed(self, streamed_names(self.stream) or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(EngineSettings, ScaleSettings):
    """What `carpool serve` needs to know on top."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 exposes the server")
    port: int = setting(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    uds: str | None = setting(None, "Unix socket to listen on, instead of host and port")
    allowed_host: tuple[str, ...] = setting(
        (),
        "name by which clients may call the server (Host), beside addresses, localhost and --host; "
        "* for any, which is the default with API keys and with --uds; repeatable",
    )
    root_path: str = setting("", "path under which a proxy shows the server, such as /draw")
    api_key: tuple[str, ...] = setting(
        (), "bearer token that clients must send, as KEY or NAME=KEY; repeatable"
    )
    api_key_file: str | None = setting(
        None, "file of more of them, one a line; read again on SIGHUP"
    )
    requests_per_minute: int | None = setting(
        None, "requests for work that one key may make; default: no limit", least=1
    )
    max_in_flight_per_key: int | None = setting(
        None,
        "of those, how many may be unanswered at once, with jobs that have not ended; default: "
        "no limit",
        least=1,
    )
    served_model_name: str | None = setting(None, "model id in answers; default: the model's own")
    workers: int | None = setting(
        None,
        "worker processes, each with the model, one a device; default: one, or one for each of "
        "--devices",
        least=1,
        most=1024,
    )
    devices: str | None = setting(
        None, "devices of the workers by commas, as cuda:0,cuda:1; default: all, as --device says"
    )
    max_loaded: int | None = setting(
        None,
        "of several models, how many may be loaded at the same time: those of load: on_demand make "
        "room; default: no limit",
        least=1,
    )
    max_n: int = setting(10, "most images of one HTTP request", least=1)
    max_body_bytes: int = setting(1 << 20, "largest HTTP body", unit="bytes", least=1)
    max_upload_bytes: int = setting(
        64 << 20, "largest HTTP body with pictures to edit", unit="bytes", least=1
    )
    max_in_flight_bytes: int = setting(
        192 << 20,
        "memory that bodies and pictures of unanswered requests may take; one key has half of it "
        "at most",
        unit="bytes",
        least=1,
    )
    allow_remote_media: bool = setting(
        False, "fetch pictures that requests name by http(s) URLs, from public addresses only"
    )
    metadata: bool = setting(True, "write into files what made them, and that a model did")
    metadata_prompt: bool = setting(False, "write prompts there too")
    max_frames: int = setting(512, "most frames of a video", least=1)
    playground: bool = setting(True, "serve a page for browsers at /")
    state_dir: str | None = setting(
        None,
        "folder of jobs and their files; none keeps them in memory; default: the port's own in "
        "the user's state folder, memory if the port is 0",
    )
    job_ttl: float = setting(
        86400.0,
        "how long a job may take, and how long it is kept once it has ended; only time in which a "
        "server has the store open counts",
        unit="s",
        least=1,
    )
    max_store_bytes: int = setting(
        10 << 30, "files of jobs in all; the oldest go first", unit="bytes", least=1
    )
    worker_timeout: float = setting(
        60.0,
        "restart a worker silent this long; running forwards get five times their predicted time",
        unit="s",
        least=0.1,
    )
    journal: Journalling = setting(
        "all",
        "keep what modules answered, so that requests go on with their next step when their "
        "worker has died. memory: of all requests, in memory; jobs: of jobs only, in the state "
        "folder, too, so that they go on in the next server; all: both; off: requests run again",
    )
    drain_timeout: float = setting(
        30.0, "how long running requests may go on after SIGTERM", unit="s", least=0
    )
    log_level: LogLevel = setting("info", "least severe log")
    log_format: LogFormat = setting("text", "json: an object a line, on standard error too")
    log_prompts: bool = setting(False, "write prompts into the log")
    otel: bool = setting(
        False, "send traces by OpenTelemetry; so does any OTEL_EXPORTER_OTLP_*ENDPOINT variable"
    )

    @property
    def has_keys(self) -> bool:
        """Do clients need an API key?"""
        return bool(self.api_key) or self.api_key_file is not None

    def engine(self) -> EngineSettings:
        """The part that the worker needs."""
        names = [field.name for field in dataclasses.fields(EngineSettings)]
        return EngineSettings(**{name: getattr(self, name) for name in names})

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **flags: Any) -> Self:
        """Settings from `CARPOOL_*` variables, overlaid with `flags` that are not None.

        Raises:
            SettingRejected: an unknown variable, or a value that breaks its rule.
        """
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX) or variable in _NO_SETTINGS:
                continue
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in hints:
                known = [ENV_PREFIX + field.upper() for field in hints]
                raise SettingRejected(f"unknown variable {variable}{nearest(variable, known)}")
            values[name] = parse(variable, text, hints[name])
        values |= {name: value for name, value in flags.items() if value is not None}
        return cls(**with_mode(values))


def with_mode(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, with the batching mode that they choose if they do not say one.

    Raises:
        SettingRejected: they are for two modes, or for another one than `batching_mode`.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(EngineSettings)}
    return with_chosen_mode(given, defaults)


WORKERS = ("workers", "devices", "worker_timeout")
"""Settings of the server's that `carpool.load` takes too, for worker processes."""

JOBS = ("state_dir", "job_ttl", "max_store_bytes", "metadata", "metadata_prompt")
"""Settings of the server's that `carpool.load` takes too, for the jobs of its engine."""


_OTHER_NAMES = {"torch_dtype": "dtype", "device_map": "device", "batch_size": "max_batch_size"}
"""What settings are called in other programs."""

OF_FILES = ("dtype", "revision", "variant", "model_config", "component", "quantize")
"""Settings that say how a model is read: a pipeline that is there already has been."""


def load_settings(settings: Mapping[str, Any]) -> ServeSettings:
    """Keyword arguments of `carpool.load`; names the nearest setting for an unknown one."""
    known = [*(field.name for field in dataclasses.fields(EngineSettings)), *JOBS, *WORKERS]
    for name in settings:
        if name not in known:
            hint = _OTHER_NAMES.get(name)
            told = f"; did you mean {hint!r}?" if hint else nearest(name, known)
            raise SettingRejected(f"unknown setting {name!r}{told}")
    return ServeSettings(**with_mode({name: _plain(value) for name, value in settings.items()}))


def _plain(value: Any) -> Any:
    """A setting as text where Python has an object for it: torch's types and devices, paths."""
    if isinstance(value, PurePath) or type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return value
