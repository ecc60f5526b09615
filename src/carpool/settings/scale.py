"""Settings of `carpool serve` about the place and number of its workers."""

from dataclasses import dataclass
from typing import Annotated

from carpool.settings.rules import FINITE, Meta, Positive, setting


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Part of `ServeSettings`."""

    worker_python: str | None = setting(
        None,
        "python of another environment for the workers, with this version of carpool: for "
        "models whose package pins other libraries; default: the server's own",
    )
    min_workers: Annotated[int, Meta(ge=1, le=1024)] | None = setting(
        None, "fewest workers, where their number follows the load; default: 1"
    )
    max_workers: Annotated[int, Meta(ge=1, le=1024)] | None = setting(
        None,
        "most workers: their number follows the load, from --min-workers on; default: it is fixed",
    )
    scale_up_wait: Annotated[float, Meta(ge=0.1, le=FINITE)] = setting(
        10.0, "start a worker when requests are predicted to wait longer than this", "s"
    )
    scale_down_after: Annotated[float, Meta(ge=1, le=FINITE)] = setting(
        300.0, "stop a worker after this long without work for all workers", "s"
    )
    ray: str | None = setting(
        None,
        "place the workers on the nodes of the Ray cluster at this address, auto for this "
        "machine's; needs the package ray. See docs/scale-out.md",
    )
    fleet_name: str = setting(
        "carpool", "ray: a server takes over workers that a server of this fleet name left"
    )
    workers_per_node: Positive | None = setting(
        None, "ray: most workers of a model on one node; default: as many as fit"
    )
    gpus_per_worker: Annotated[float, Meta(ge=0, le=64)] | None = setting(
        None, "ray: GPUs of a worker; default: 1 if the cluster has any and --device is not cpu"
    )
    worker_keep_alive: Annotated[float, Meta(ge=10, le=FINITE)] = setting(
        600.0, "ray: how long workers keep their models after their server stops", "s"
    )
    fleet_cert: str | None = setting(None, "ray: certificate file (PEM) for TLS to workers")
    fleet_key: str | None = setting(None, "ray: file of its private key (PEM)")
