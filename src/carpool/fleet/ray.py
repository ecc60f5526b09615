"""Workers on the nodes of a Ray cluster. The only module that imports Ray.

Ray places workers, provides their address and the fleet's secret, and restarts a lost worker on
another node; requests use our own connections (`remote_connection.py`). Each worker is a detached
actor that hosts a worker's process (`host.py`): a front that restarts under the same fleet name
finds it, with its model loaded.

Source: the placement of vLLM's `RayExecutorV2`: Ray starts workers, messages carry the work.
"""

import asyncio
import hashlib
import logging
import re
import secrets
import socket
import ssl
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import carpool
from carpool.config import ServeSettings
from carpool.errors import SettingRejected
from carpool.fleet.handshake import CONNECT_S, new_secret
from carpool.fleet.host import WorkerHost
from carpool.fleet.remote_connection import WorkerAddress

log = logging.getLogger("carpool")

NOTICED_S = 20.0
"""Ray notices after 15 s that a node is gone, and then places nothing there. Until that time a node
stays suspect, a spare worker is awaited, and the log does not mention a missing place.
"""


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        fix = "pip install 'ray>=2.52,<3'"
        raise SettingRejected(f"ray: the package cannot be imported ({error}): {fix}") from error
    return ray


class WorkerActor:
    """The actor that Ray runs on a node: hosts one worker's process, on a separate thread."""

    def __init__(self, secret: bytes, keep_s: float, certificate: str, key: str) -> None:
        ray = _ray()
        self._me = ray.get_runtime_context().current_actor
        self._secret, self._keep_s = secret, keep_s
        self._tls = server_tls(certificate, key) if certificate else None
        self._address: str = ray.util.get_node_ip_address()
        self._node: str = ray.get_runtime_context().get_node_id()
        self._port: Future[int] = Future()
        threading.Thread(target=self._run, name="carpool-host", daemon=True).start()

    def join(self) -> tuple[str, int, bytes, str, str]:
        """The host's address, the fleet's secret, the version of Carpool on its node, the node."""
        port = self._port.result(NOTICED_S)
        return self._address, port, self._secret, carpool.__version__, self._node

    def _run(self) -> None:
        if sys.version_info < (3, 14):  # uvloop, which Ray sets, cannot start processes on a thread
            asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:
                if not self._port.done():
                    self._port.set_exception(error)
                raise

    async def _serve(self) -> None:
        unused = asyncio.Event()
        host = WorkerHost(self._secret, keep_s=self._keep_s, at_end=unused.set, tls=self._tls)
        self._port.set_result(await host.listen(self._address))
        await unused.wait()
        log.warning("no front came for %g s: the worker ends", self._keep_s)
        await host.close()
        _ray().kill(self._me, no_restart=True)


def _check_reachable(address: str) -> None:
    """Raise OSError if HOST:PORT does not accept connections: Ray would retry for a minute."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), CONNECT_S).close()


def server_tls(certificate: str, key: str) -> ssl.SSLContext:
    """TLS of a worker's end; both arguments are PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:  # OpenSSL reads only files
        files = [Path(folder, name) for name in ("certificate", "key")]
        for file, text in zip(files, (certificate, key), strict=True):
            file.touch(0o600)
            file.write_text(text)
        context.load_cert_chain(files[0], files[1])
    return context


class RayCluster:
    """The workers of one fleet in a Ray cluster; fronts of one fleet name share them.

    Raises:
        SettingRejected: a file of the certificate cannot be read, or is missing.
    """

    def __init__(self, settings: ServeSettings) -> None:
        if (settings.fleet_cert is None) != (settings.fleet_key is None):
            raise SettingRejected("fleet_cert and fleet_key: give both, or none")
        self._settings = settings
        self._certificate = _text("fleet_cert", settings.fleet_cert)
        self._key = _text("fleet_key", settings.fleet_key)
        self._actors: dict[str, list[Any]] = {}  # actors left by an earlier front, by model
        self._secret = new_secret()
        self._gpus = 0.0
        self._suspects: dict[str, float] = {}  # nodes, with the time of suspicion

    def connect(self) -> None:
        """Connect to the cluster, and find the workers of an earlier front. Blocks.

        Raises:
            SettingRejected: Ray is not installed, or there is no such cluster.
        """
        # Ray warns that it cannot set signal handlers on this thread; ours stay in place
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
        ray, settings = _ray(), self._settings
        try:
            _check_reachable(str(settings.ray))
            ray.init(
                settings.ray,
                namespace=f"carpool-{settings.fleet_name}",
                log_to_driver=False,
                configure_logging=False,
            )
        except (OSError, RuntimeError, ValueError) as error:
            here = "start one with `ray start --head`, or give its address as HOST:PORT"
            problem = f"there is no Ray cluster ({error}): {here}"
            raise SettingRejected(f"ray={settings.ray!r}: {problem}") from error
        has_gpus = bool(ray.cluster_resources().get("GPU"))
        gpus = 0.0 if settings.device == "cpu" else settings.gpus_per_worker
        self._gpus = float(has_gpus) if gpus is None else gpus
        for name in ray.util.list_named_actors():
            if "|" in name:
                self._actors.setdefault(name.partition("|")[0], []).append(ray.get_actor(name))
        if self._actors:
            log.info("workers of an earlier front: %d", sum(map(len, self._actors.values())))

    def disconnect(self) -> None:
        """Leave the cluster; the workers stay. Blocks."""
        _ray().shutdown()

    def workers(self, model: str) -> int:
        """The number of a model's workers left by an earlier front."""
        return len(self._actors.get(_named(model), []))

    def take(self, model: str, ranks: int = 1) -> Any:
        """Take a worker of an earlier front, or place a new one. Blocks.

        Args:
            ranks: processes of a worker that is a group; they share one node.
        """
        actors = self._actors.get(_named(model))
        if actors:
            return actors.pop(0)
        ray, settings = _ray(), self._settings
        resources, dead = {}, self._lost_nodes()
        if settings.workers_per_node is not None:
            # every node has one unit of it; Ray Serve builds `max_replicas_per_node` like this
            prefix = ray._raylet.IMPLICIT_RESOURCE_PREFIX
            per_node = f"{prefix}carpool-{settings.fleet_name}-{_named(model)}"
            resources[per_node] = 1.0 / settings.workers_per_node
        return (
            ray.remote(WorkerActor)
            .options(
                name=f"{_named(model)}|{secrets.token_hex(4)}",
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=0,
                num_cpus=ranks,
                num_gpus=self._gpus * ranks,
                resources=resources,
                scheduling_strategy="SPREAD",
                label_selector={"ray.io/node-id": f"!in({','.join(dead)})"} if dead else None,
            )
            .remote(self._secret, settings.worker_keep_alive, self._certificate, self._key)
        )

    def end(self, actor: Any) -> None:
        """End a worker permanently. Blocks."""
        _ray().kill(actor, no_restart=True)

    async def join(self, actor: Any) -> WorkerAddress | None:
        """Wait until Ray has placed a worker; returns its address; None: it has ended permanently.

        Raises:
            OSError: it is unreachable; it may be back later.
        """
        errors = _ray().exceptions
        joining = asyncio.wrap_future(actor.join.remote().future())
        try:
            host, port, secret, version, *node = await joining  # earlier versions send no node
        except (errors.ActorDiedError, errors.ActorUnschedulableError) as error:
            log.warning("a worker is gone: %s", str(error).partition("\n")[0])
            return None
        except errors.RayError as error:
            raise ConnectionError(f"Ray: {str(error).partition(chr(10))[0]}") from error
        if version != carpool.__version__:
            front = carpool.__version__
            log.warning("a worker has Carpool %s, and the front %s: it is replaced", version, front)
            await asyncio.to_thread(self.end, actor)
            return None
        return WorkerAddress(host, port, secret, self._certificate, *node)

    def suspect(self, node: str) -> None:
        """Mark the node of an unreachable worker: for a while it gets no new workers."""
        self._suspects[node] = time.monotonic()

    def trust(self, node: str) -> None:
        """Unmark the node of a reached worker."""
        self._suspects.pop(node, None)

    def _lost_nodes(self) -> list[str]:
        """The suspected nodes, to exclude from placement. Ray excludes dead nodes by itself."""
        since_s = time.monotonic() - NOTICED_S
        return sorted(node for node, at_s in self._suspects.items() if at_s > since_s)


def connected(settings: ServeSettings) -> RayCluster:
    """Connect to the configured cluster. Blocks; errors as of `RayCluster` and its `connect`."""
    cluster = RayCluster(settings)
    cluster.connect()
    return cluster


def _text(setting: str, path: str | None) -> str:
    if path is None:
        return ""
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingRejected(f"{setting}={path!r} cannot be read: {error}") from error


def _named(model: str) -> str:
    """A model's name for actors and resources, made unique by a digest."""
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', model)[-60:]}-{digest}"
