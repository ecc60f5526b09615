"""Settings of `carpool serve` about the place and number of its workers."""

from dataclasses import dataclass

from carpool.settings.rules import setting


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Part of `ServeSettings`."""

    worker_python: str | None = setting(
        None,
        "python of another environment for the workers, with this version of carpool: for "
        "models whose package pins other libraries; default: the server's own",
    )
    min_workers: int | None = setting(
        None, "fewest workers, where their number follows the load; default: 1", least=1, most=1024
    )
    max_workers: int | None = setting(
        None,
        "most workers: their number follows the load, from --min-workers on; default: it is fixed",
        least=1,
        most=1024,
    )
    scale_up_wait: float = setting(
        10.0,
        "start a worker when requests are predicted to wait longer than this",
        unit="s",
        least=0.1,
        finite=True,
    )
    scale_down_after: float = setting(
        300.0,
        "stop a worker after this long without work for all workers",
        unit="s",
        least=1,
        finite=True,
    )
    ray: str | None = setting(
        None,
        "place the workers on the nodes of the Ray cluster at this address, auto for this "
        "machine's; needs the package ray. See docs/scale-out.md",
    )
    fleet_name: str = setting(
        "carpool", "ray: a server takes over workers that a server of this fleet name left"
    )
    workers_per_node: int | None = setting(
        None, "ray: most workers of a model on one node; default: as many as fit", least=1
    )
    gpus_per_worker: float | None = setting(
        None,
        "ray: GPUs of a worker; default: 1 if the cluster has any and --device is not cpu",
        least=0,
        most=64,
    )
    worker_keep_alive: float = setting(
        600.0,
        "ray: how long workers keep their models after their server stops",
        unit="s",
        least=10,
        finite=True,
    )
    fleet_cert: str | None = setting(
        None, "ray: certificate file (PEM) for TLS connections to workers"
    )
    fleet_key: str | None = setting(None, "ray: file of its private key (PEM)")
