"""The settings of `carpool serve` that say where its workers are, and how many there may be."""

from dataclasses import dataclass

from carpool.settings.rules import setting


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Part of `ServeSettings`."""

    worker_python: str | None = setting(
        None,
        "python of another environment that runs the workers, with this version of carpool: for "
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
        "end a worker when for so long there was not work for all of them",
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
        "carpool", "ray: a server takes over the workers that one of the same fleet name left"
    )
    workers_per_node: int | None = setting(
        None, "ray: most workers of a model on one node; default: as many as have room", least=1
    )
    gpus_per_worker: float | None = setting(
        None,
        "ray: GPUs of a worker; default: 1 where the cluster has some and --device is not cpu",
        least=0,
        most=64,
    )
    worker_keep_alive: float = setting(
        600.0,
        "ray: how long workers keep their models when their server has gone",
        unit="s",
        least=10,
        finite=True,
    )
    fleet_cert: str | None = setting(
        None, "ray: file of the certificate (PEM) with which workers are reached by TLS"
    )
    fleet_key: str | None = setting(None, "ray: file of its private key (PEM)")
