"""All settings: name, default, unit, rule and help of each.

`carpool.load(MODEL, **settings)` takes the settings of `EngineSettings` and `JOBS`; `carpool serve`
takes the settings of `ServeSettings` as flags (`max_queue` is `--max-queue`) and environment
variables (`CARPOOL_MAX_QUEUE`). A flag wins over the environment, the environment over the default.
This module does not implement the settings' effects.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self, get_type_hints

from carpool.errors import SettingRejected, nearest
from carpool.settings.batching_mode import with_mode
from carpool.settings.engine import BatchingMode as BatchingMode
from carpool.settings.engine import EngineSettings as EngineSettings
from carpool.settings.rules import Meta, Positive, parse, setting
from carpool.settings.scale import ScaleSettings

ENV_PREFIX = "CARPOOL_"
FAULT_VARIABLE = "CARPOOL_FAULT"
"""A test hook, not a setting; see `carpool.engine.faults`."""
FORKSERVER_VARIABLE = "CARPOOL_FORKSERVER"
"""`off`, or the address of a fork server; see `carpool.worker.start`."""

LANGUAGE_KEY_VARIABLE = "CARPOOL_LANGUAGE_KEY"
"""The key for `language_url`; not a setting, because settings may be listed and logged."""
_NO_SETTINGS = {FAULT_VARIABLE, FORKSERVER_VARIABLE, LANGUAGE_KEY_VARIABLE}

Journalling = Literal["off", "memory", "jobs", "all"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(EngineSettings, ScaleSettings):
    """Settings of `carpool serve`, in addition to an engine's."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 exposes the server")
    port: Annotated[int, Meta(ge=0, le=65535)] = setting(
        8000, "port to listen on; 0 takes a free one"
    )
    uds: str | None = setting(None, "Unix socket to listen on, instead of host and port")
    allowed_host: tuple[str, ...] = setting(
        (),
        "host name that clients may use (Host), besides addresses, localhost and --host; "
        "* for any, which is the default with API keys and with --uds; repeatable",
    )
    root_path: str = setting("", "path under which a proxy shows the server, such as /draw")
    api_key: tuple[str, ...] = setting(
        (), "bearer token that clients must send, as KEY or NAME=KEY; repeatable"
    )
    api_key_file: str | None = setting(
        None, "file with more API keys, one per line; read again on SIGHUP"
    )
    requests_per_minute: Positive | None = setting(
        None, "most work requests of an API key; default: no limit"
    )
    max_in_flight_per_key: Positive | None = setting(
        None, "most unanswered requests of an API key, with its unfinished jobs; default: no limit"
    )
    served_model_name: str | None = setting(None, "model id in answers; default: the model's own")
    workers: Annotated[int, Meta(ge=1, le=1024)] | None = setting(
        None,
        "worker processes, each with the model, one per device; default: one, or one for each of "
        "--devices",
    )
    devices: str | None = setting(
        None, "devices of the workers, as cuda:0,cuda:1; default: all of the kind of --device"
    )
    max_loaded: Positive | None = setting(
        None,
        "most models in memory, if there are several: models with load: on_demand are unloaded "
        "first; default: no limit",
    )
    max_n: Positive = setting(10, "most images of one HTTP request")
    max_body_bytes: Positive = setting(1 << 20, "largest HTTP body", "bytes")
    max_upload_bytes: Positive = setting(
        64 << 20, "largest HTTP body with pictures to edit", "bytes"
    )
    max_in_flight_bytes: Positive = setting(
        192 << 20,
        "most memory for bodies and pictures of unanswered requests; one key may use half of it",
        "bytes",
    )
    allow_remote_media: bool = setting(
        False, "fetch pictures from http(s) URLs in requests, from public addresses only"
    )
    webhook_secret: str | None = setting(
        None,
        "allow webhooks of jobs, and sign their events: whsec_ and base64 of 24 to 64 bytes; "
        "better set in the environment",
    )
    webhook_host: tuple[str, ...] = setting(
        (), "host with a private address that webhooks may use; repeatable"
    )
    upload: str | None = setting(
        None,
        "copy files of jobs to s3://BUCKET/FOLDER (or gs:, az:); credentials and endpoint by "
        "AWS_* variables; needs obstore",
    )
    metadata: bool = setting(True, "write settings into files, and that a model made them")
    metadata_prompt: bool = setting(False, "include prompts in this metadata")
    max_frames: Positive = setting(512, "most frames of a video")
    max_faces: Positive = setting(2_000_000, "most faces of a mesh")
    max_sound: Annotated[float, Meta(ge=0.001)] = setting(600.0, "longest sound", "s")
    playground: bool = setting(True, "serve a page for browsers at /")
    state_dir: str | None = setting(
        None,
        "folder of jobs and their files; none keeps them in memory; default: one for each port in "
        "the user's state folder, memory if the port is 0",
    )
    job_ttl: Annotated[float, Meta(ge=1)] = setting(
        86400.0,
        "most time of a job, and its retention after its end; only time with a running server "
        "counts",
        "s",
    )
    max_store_bytes: Positive = setting(
        10 << 30, "most bytes of all jobs' files; the oldest are deleted", "bytes"
    )
    worker_timeout: Annotated[float, Meta(ge=0.1)] = setting(
        60.0,
        "restart a worker silent this long; running forwards get five times their predicted time",
        "s",
    )
    journal: Journalling = setting(
        "all",
        "keep outputs of modules, so requests continue at their next step after a worker's death. "
        "memory: of all requests, in memory; jobs: only of jobs, also in the state folder, so they "
        "continue in the next server; all: both; off: requests restart",
    )
    drain_timeout: Annotated[float, Meta(ge=0)] = setting(
        30.0, "most time of running requests after SIGTERM", "s"
    )
    log_level: LogLevel = setting("info", "least severe log")
    log_format: LogFormat = setting("text", "json: an object per line, on standard error too")
    log_prompts: bool = setting(False, "write prompts into the log")
    otel: bool = setting(
        False, "send traces by OpenTelemetry; so does any OTEL_EXPORTER_OTLP_*ENDPOINT variable"
    )

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_key) or self.api_key_file is not None

    def engine(self) -> EngineSettings:
        """The settings of the worker. API keys have equal shares, unless weights are set."""
        names = [field.name for field in dataclasses.fields(EngineSettings)]
        values = {name: getattr(self, name) for name in names}
        if self.has_keys and not self.fair_share:
            values["fair_share"] = ("*=1",)
        return EngineSettings(**values)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **flags: Any) -> Self:
        """Read settings from `CARPOOL_*` variables; `flags` that are not None or empty win.

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
                variables = [ENV_PREFIX + field.upper() for field in hints]
                raise SettingRejected(f"unknown variable {variable}{nearest(variable, variables)}")
            values[name] = parse(variable, text, hints[name])
        values |= {name: value for name, value in flags.items() if value not in (None, ())}
        return cls(**with_mode(values))


WORKERS = ("workers", "devices", "worker_timeout")
"""Server settings about workers that `carpool.load` takes too."""

JOBS = ("state_dir", "job_ttl", "max_store_bytes", "metadata", "metadata_prompt")
"""Server settings about jobs that `carpool.load` takes too."""


_OTHER_NAMES = {"torch_dtype": "dtype", "device_map": "device", "batch_size": "max_batch_size"}
"""Names of settings in other programs."""


def load_settings(settings: Mapping[str, Any]) -> ServeSettings:
    """Check keyword arguments of `carpool.load`; an unknown name gets a suggestion."""
    names = [*(field.name for field in dataclasses.fields(EngineSettings)), *JOBS, *WORKERS]
    for name in settings:
        if name not in names:
            hint = _OTHER_NAMES.get(name)
            suggestion = f"; did you mean {hint!r}?" if hint else nearest(name, names)
            raise SettingRejected(f"unknown setting {name!r}{suggestion}")
    return ServeSettings(**with_mode({name: _plain(value) for name, value in settings.items()}))


def _plain(value: Any) -> Any:
    """Convert objects to a setting's text: torch types and devices, paths."""
    if isinstance(value, PurePath) or type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return value
