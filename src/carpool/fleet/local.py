"""Build the pool or fleet for a list of models, on this machine or elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from carpool.config import LogFormat, LogLevel
from carpool.fleet.deployment import Deployment
from carpool.fleet.fleet import Fleet
from carpool.fleet.models import ModelSpec, settings_on
from carpool.fleet.pool import Pool
from carpool.worker.connection import Connector
from carpool.worker.guilt import Deadlock, DeathLog
from carpool.worker.journals import Journals
from carpool.worker.start import Start
from carpool.worker.supervisor import Supervisor, WorkerListener

if TYPE_CHECKING:
    from carpool.fleet.ray import RayCluster


class WorkerOptions(TypedDict, total=False):
    """Options of `Supervisor` that all workers share."""

    spool: Path | None
    timeout_s: float
    log: tuple[LogLevel, LogFormat, bool]
    otel: bool
    journals: Journals | None
    start: Start
    deaths: DeathLog


def local_fleet(
    specs: Sequence[ModelSpec],
    max_loaded: int | None = None,
    remote: "RayCluster | None" = None,
    **options: Unpack[WorkerOptions],
) -> Fleet | Pool:
    """Build the pool of one model, or the fleet of several.

    Args:
        max_loaded: as in `Fleet`.
        remote: places remote workers; None: local processes.
    """
    options.setdefault("deaths", DeathLog())  # shared by all models

    def pool_of(spec: ModelSpec) -> Pool:
        return local_pool(spec, remote, **options)

    if len(specs) == 1 and not specs[0].is_on_demand:
        return pool_of(specs[0])

    def deployment(spec: ModelSpec) -> Deployment:
        return Deployment(
            spec.name,
            lambda: pool_of(spec),
            spec.is_on_demand,
            spec.keep_alive_s,
            admits_late=spec.settings.admit_late,
        )

    return Fleet([deployment(spec) for spec in specs], max_loaded)


def local_pool(
    spec: ModelSpec, remote: "RayCluster | None" = None, **options: Unpack[WorkerOptions]
) -> Pool:
    """Build the pool of one model; arguments as of `local_fleet`."""
    options.setdefault("deaths", DeathLog())
    deadlock, ranks = Deadlock(), spec.settings.context_parallel

    def connector() -> Connector | None:
        if remote is None:
            return None
        from carpool.fleet.ray_connector import RayConnector

        return RayConnector(remote, name_of(spec), options.get("spool"), ranks=ranks)

    def make(device: str, listener: WorkerListener) -> Supervisor:
        return Supervisor(
            spec.model,
            settings_on(spec, device),
            connector=connector(),
            factory=spec.factory,
            bars=len(spec.devices) == 1,
            listener=listener,
            deadlock=deadlock,
            **options,
        )

    workers = spec.workers
    if remote is not None and spec.scale is not None:  # count workers that are already loaded
        count = remote.workers(name_of(spec))
        workers = min(max(count, workers or 1, spec.scale.low), spec.scale.high)
    return Pool(
        make,
        spec.devices,
        spec.settings,
        options.get("journals"),
        workers=workers,
        scale=spec.scale,
        is_fixed=remote is None,
    )


def name_of(spec: ModelSpec) -> str:
    """The name of a model's workers: unique per model and group size."""
    name, ranks = spec.name or spec.factory or spec.model, spec.settings.context_parallel
    return name if ranks == 1 else f"{name} ({ranks} ranks)"
