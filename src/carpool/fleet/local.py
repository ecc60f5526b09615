"""Workers as processes of this machine."""

from collections.abc import Sequence
from pathlib import Path

from carpool.config import LogFormat, LogLevel
from carpool.fleet.fleet import Deployment, Fleet
from carpool.fleet.models import ModelSpec, settings_on
from carpool.fleet.pool import Pool
from carpool.fleet.serving import Serving
from carpool.worker.journals import Journals
from carpool.worker.start import Start, spawn
from carpool.worker.supervisor import Supervisor, WorkerListener


def local_fleet(
    specs: Sequence[ModelSpec],
    *,
    spool: Path | None = None,
    timeout_s: float = 60.0,
    log: tuple[LogLevel, LogFormat, bool] = ("info", "text", False),
    otel: bool = False,
    max_loaded: int | None = None,
    journals: Journals | None = None,
    start: Start = spawn,
) -> Serving:
    """What serves these models; the arguments are as for `local_pool` and `Fleet`."""

    def pool_of(spec: ModelSpec) -> Pool:
        return local_pool(
            spec,
            spool=spool,
            timeout_s=timeout_s,
            log=log,
            otel=otel,
            journals=journals,
            start=start,
        )

    if len(specs) == 1 and not specs[0].is_on_demand:
        return pool_of(specs[0])

    def deployment(spec: ModelSpec) -> Deployment:
        return Deployment(spec.name, lambda: pool_of(spec), spec.is_on_demand, spec.keep_alive_s)

    return Fleet([deployment(spec) for spec in specs], max_loaded)


def local_pool(
    spec: ModelSpec,
    *,
    spool: Path | None = None,
    timeout_s: float = 60.0,
    log: tuple[LogLevel, LogFormat, bool] = ("info", "text", False),
    otel: bool = False,
    journals: Journals | None = None,
    start: Start = spawn,
) -> Pool:
    """The workers of one model; the arguments are as for `Supervisor`."""

    def make(device: str, listener: WorkerListener | None) -> Supervisor:
        return Supervisor(
            spec.model,
            settings_on(spec, device),
            spool=spool,
            timeout_s=timeout_s,
            log=log,
            otel=otel,
            factory=spec.factory,
            listener=listener,
            journals=journals,
            start=start,
        )

    return Pool(make, spec.devices, spec.settings, journals)
