"""Build the fleet for a list of models, on this machine or elsewhere."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.config import LogFormat, LogLevel
from carpool.fleet.deployment import Deployment
from carpool.fleet.fleet import Fleet
from carpool.fleet.models import ModelSpec, settings_on
from carpool.fleet.pool import Pool
from carpool.worker.connection import Connector, LocalConnector
from carpool.worker.guilt import Deadlock, DeathLog
from carpool.worker.journals import Journals
from carpool.worker.protocol import LoadModel
from carpool.worker.start import Start, spawn
from carpool.worker.supervisor import Supervisor, WorkerListener

if TYPE_CHECKING:
    from carpool.fleet.ray import RayCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of the workers of all models; see `LoadModel`, `Supervisor`, `LocalConnector`."""

    spool: Path | None = None
    timeout_s: float = 60.0
    log: tuple[LogLevel, LogFormat, bool] = ("info", "text", False)  # with or without prompts
    otel: bool = False
    journals: Journals | None = None
    start: Start = spawn
    deaths: DeathLog = field(default_factory=DeathLog)


def local_fleet(
    specs: Sequence[ModelSpec],
    options: WorkerOptions,
    max_loaded: int | None = None,
    remote: "RayCluster | None" = None,
) -> Fleet:
    """Build the fleet of one or several models.

    Args:
        max_loaded: as in `Fleet`.
        remote: places remote workers; None: local processes.
    """

    def deployment(spec: ModelSpec) -> Deployment:
        late, make = spec.settings.admit_late, partial(local_pool, spec, options, remote)
        return Deployment(spec.name, make, spec.is_on_demand, spec.keep_alive_s, admits_late=late)

    return Fleet([deployment(spec) for spec in specs], max_loaded)


def local_pool(spec: ModelSpec, options: WorkerOptions, remote: "RayCluster | None" = None) -> Pool:
    """Build the pool of one model; arguments as of `local_fleet`."""
    deadlock, ranks = Deadlock(), spec.settings.context_parallel
    spool = b"" if options.spool is None or remote is not None else os.fsencode(options.spool)

    def connector() -> Connector:
        if remote is None:
            return LocalConnector(options.spool, options.start)
        from carpool.fleet.ray_connector import RayConnector

        return RayConnector(remote, name_of(spec), options.spool, ranks=ranks)

    def make(device: str, listener: WorkerListener) -> Supervisor:
        load = LoadModel(
            spec.model, settings_on(spec, device), spool, *options.log, options.otel,
            bars=len(spec.devices) == 1, factory=spec.factory,
        )  # fmt: skip
        return Supervisor(
            load, connector(), timeout_s=options.timeout_s, listener=listener,
            journals=options.journals, deaths=options.deaths, deadlock=deadlock,
        )  # fmt: skip

    workers = spec.workers
    if remote is not None and spec.scale is not None:  # count workers that are already loaded
        count = remote.workers(name_of(spec))
        workers = min(max(count, workers or 1, spec.scale.low), spec.scale.high)
    return Pool(
        make, spec.devices, spec.settings, options.journals,
        workers=workers, scale=spec.scale, is_fixed=remote is None,
    )  # fmt: skip


def name_of(spec: ModelSpec) -> str:
    """The name of a model's workers: unique per model and group size."""
    name, ranks = spec.name or spec.factory or spec.model, spec.settings.context_parallel
    return name if ranks == 1 else f"{name} ({ranks} ranks)"
