"""`carpool serve`: starts the front and its worker, and drains them when it is told to stop."""

import asyncio
import contextlib
import ctypes
import errno
import gc
import itertools
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click
import uvicorn

from carpool.config import ServeSettings
from carpool.errors import LoadFailed, SettingRejected, StoreFailed
from carpool.fleet.fleet import Fleet
from carpool.fleet.local import local_fleet
from carpool.fleet.models import ModelSpec
from carpool.fleet.serving import Serving
from carpool.jobs.journals import JobJournals
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.media.inputs import unpacked
from carpool.schedule.policy import weights
from carpool.server.access.keys import Keyring
from carpool.server.app import create_app
from carpool.server.routes.jobs import write_images
from carpool.server.routes.videos import write_video
from carpool.server.transport.http_protocol import StrictHTTPProtocol
from carpool.server.transport.unix_socket import WAITING, UnixSocket
from carpool.telemetry import logs, tracing
from carpool.telemetry.tracing import Tracing
from carpool.worker import protocol
from carpool.worker.journals import Journals
from carpool.worker.start import ForkingStarter

log = logging.getLogger("carpool")

# Connections accepted in one turn of the event loop. Where descriptors run out, Python 3.11 logs an
# error for each: with uvicorn's number a thousand a second.
_ACCEPTED = 1
_SWITCH_S = 0.001  # the event loop's longest wait for another thread's Python; usually 5 ms
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 20  # as malloc.h numbers it


def serve(models: Sequence[ModelSpec], settings: ServeSettings) -> int:
    """Serve until a signal; returns the exit status of the process."""
    logs.set_up(settings.log_level, settings.log_format, prompts=settings.log_prompts)
    check_address(settings)
    os.umask(0o077)  # jobs and pictures are private
    _raise_descriptor_limit()
    _return_freed_memory()
    sys.setswitchinterval(_SWITCH_S)
    keys = Keyring(settings.api_key, settings.api_key_file)
    unknown = set(weights(settings.fair_share) or ()) - {*keys.names, "*"}
    if unknown and (keys.names or settings.api_key_file):
        log.warning("fair_share names no API key: %s", ", ".join(sorted(unknown)))
    otel = tracing.is_wanted(settings.otel, os.environ)
    traces = tracing.start("front") if otel else Tracing()
    try:
        try:
            store = JobStore(
                state_folder(settings, os.environ),
                ttl_s=settings.job_ttl,
                max_bytes=settings.max_store_bytes,
                max_waiting=settings.max_queue,
            )
        except StoreFailed as error:
            _say(settings, str(error), is_error=True)
            return 1
        with contextlib.closing(store):
            return asyncio.run(_serve(store, models, settings, keys, traces))
    finally:
        traces.stop()


def url_host(host: str) -> str:
    """A host as URLs have it."""
    return f"[{host}]" if ":" in host else host


def check_address(settings: ServeSettings) -> None:
    """Bind the address and let it go again, before anything is opened or loaded.

    Raises:
        LoadFailed: the port is taken, or the address is not one of this machine.
    """
    if settings.uds is not None:
        return
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise LoadFailed(f"host={host!r} is no address: {error}") from error
    for family, kind, protocol_, _, address in found:
        try:
            with socket.socket(family, kind, protocol_) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio does
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                told = f"port {port} is taken; use --port for another one (address already in use)"
                raise LoadFailed(told) from error
            if error.errno == errno.EACCES:
                told = f"port {port} needs privileges; use --port for one above 1023"
                raise LoadFailed(told) from error
            if error.errno == errno.EADDRNOTAVAIL and len(found) == 1:
                told = f"host={host!r} is no address of this machine; 0.0.0.0 is all of them"
                raise LoadFailed(told) from error


def _raise_descriptor_limit() -> None:
    """The usual soft limit, 1,024, is less than the requests that may wait."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "infinite" and means fewer
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _return_freed_memory() -> None:
    """Have glibc map every large buffer, and unmap it when it is freed. By default it stops that
    after the first ones: clients' pictures would stay in the front's memory."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _say(settings: ServeSettings, text: str, *, is_error: bool = False) -> None:
    """Print a line for the person who started the server; log it where logs are JSON."""
    if settings.log_format == "json":
        log.log(logging.ERROR if is_error else logging.INFO, "%s", text)
    else:
        click.echo(f"carpool: {text}" if is_error else text, err=True)


async def _serve(
    store: JobStore,
    models: Sequence[ModelSpec],
    settings: ServeSettings,
    keys: Keyring,
    traces: Tracing,
) -> int:
    journals = None
    if settings.journal != "off":
        journals = Journals(of_all=settings.journal != "jobs")
    cluster = None
    if settings.ray is not None:
        from carpool.fleet.ray import connected

        cluster = await asyncio.to_thread(connected, settings)
    starter = ForkingStarter()
    supervisor = local_fleet(
        models,
        spool=store.passing,
        timeout_s=settings.worker_timeout,
        log=(settings.log_level, settings.log_format, settings.log_prompts),
        otel=traces.is_on,
        max_loaded=settings.max_loaded,
        journals=journals,
        remote=cluster,
        start=starter.start,
    )
    at_once = sum(len(one.devices) * one.settings.max_running for one in models)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, supervisor, keys)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, supervisor.roll)
    runner = Runner(
        store,
        supervisor,
        {"image": write_images, "video": write_video},
        model=lambda: _served(supervisor, settings),
        max_running=at_once,
        read=_read,
        journals=_job_journals(store, journals, settings),
    )
    server = _DrainingServer(supervisor, settings, runner, keys, traces)
    at_start = [one for one in models if not one.is_on_demand]
    for one in at_start:
        workers = f" on {len(one.devices)} workers" if len(one.devices) > 1 else ""
        _say(settings, f"Loading {one.factory or one.model}{workers} ...")
    worker = supervisor.start()
    http = asyncio.create_task(server.serve())
    greeting = asyncio.create_task(_greet(supervisor, server, settings))
    jobs = asyncio.create_task(runner.run())
    try:
        await asyncio.wait({worker, http, jobs}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done() and not worker.cancelled() and (error := worker.exception()):
            if not isinstance(error, LoadFailed):
                raise error
            _say(settings, str(error), is_error=True)
            return 1
        if jobs.done():
            jobs.result()  # raises: it ends only by a defect
        return server.exit_status if server.started else 1
    finally:
        greeting.cancel()
        jobs.cancel()
        server.should_exit = True
        await asyncio.wait({http, jobs})
        if server.unix is not None:
            await asyncio.to_thread(server.unix.remove)
        await runner.stop()
        await supervisor.stop()
        if cluster is not None:
            await asyncio.to_thread(cluster.disconnect)
        await starter.close()


def _job_journals(
    store: JobStore, journals: Journals | None, settings: ServeSettings
) -> JobJournals | None:
    if journals is None or settings.journal == "memory":
        return None
    return JobJournals(store.journals, journals, settings.max_store_bytes // 10)


def _read(file: bytes, mode: Any) -> Any:
    """A stored picture of a job, packed for the worker. Blocks: on a thread."""
    return protocol.pack(unpacked(file, mode))


def _reload(supervisor: Serving, keys: Keyring) -> None:
    """On SIGHUP: read keys again here, adapters and batching rules in the worker."""
    try:
        log.info("reloading; API keys: %d", keys.read())
    except SettingRejected as error:
        log.error("not reloaded: %s", error)
    supervisor.reload()


def _served(serving: Serving, settings: ServeSettings) -> Collection[str]:
    """The names of the models, once they are known."""
    if isinstance(serving, Fleet):
        return serving.deployments
    return [settings.served_model_name or (serving.ready.card.id if serving.ready else "")]


def state_folder(settings: ServeSettings, environ: Mapping[str, str]) -> Path | None:
    """The folder of jobs, by default one for each port, by the XDG base directory specification;
    None: they are kept in memory."""
    if settings.state_dir is not None:
        return None if settings.state_dir == "none" else Path(settings.state_dir).expanduser()
    state = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "carpool"
    if settings.uds is not None:
        return state / Path(settings.uds).absolute().as_posix().strip("/").replace("/", "-")
    if settings.port == 0:  # another port at every start: they would not be found again
        return None
    return state / str(settings.port)


class _DrainingServer(uvicorn.Server):
    """Uvicorn that drains on a signal: it refuses new requests while running ones finish."""

    def __init__(
        self,
        supervisor: Serving,
        settings: ServeSettings,
        runner: Runner,
        keys: Keyring,
        traces: Tracing,
    ) -> None:
        app = create_app(supervisor, settings, runner, keys=keys, traces=traces)
        super().__init__(
            uvicorn.Config(
                app,
                http=StrictHTTPProtocol,
                ws="none",
                host=settings.host,
                port=settings.port,
                uds=settings.uds,
                forwarded_allow_ips="*" if settings.uds else None,  # a proxy connects
                backlog=_ACCEPTED,
                access_log=False,  # `RequestLogging` logs more
                # uvicorn's own greeting and farewell are no news beside ours
                log_level="warning" if settings.log_level == "info" else settings.log_level,
                log_config=None,
                timeout_keep_alive=StrictHTTPProtocol.idle_timeout_s,
                timeout_graceful_shutdown=5,
                lifespan="off",
            )
        )
        self._app = app
        self._supervisor, self._drain_timeout_s = supervisor, settings.drain_timeout
        self._draining: asyncio.Task[None] | None = None
        self.exit_status = 0
        self.is_up = asyncio.Event()
        self.unix: UnixSocket | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            if self.config.uds is not None:
                self.unix = await asyncio.to_thread(UnixSocket, Path(self.config.uds))
                sockets = [self.unix.socket]
                log.info("listening on %s", self.config.uds)
            await super().startup(sockets)
            for listening in itertools.chain.from_iterable(one.sockets for one in self.servers):
                with socket.socket(fileno=os.dup(listening.fileno())) as same:
                    same.listen(WAITING)  # uvicorn's only setting for both is `_ACCEPTED`
        except (SystemExit, OverflowError, OSError) as error:
            if not isinstance(error, SystemExit):  # by which uvicorn says: the port is taken
                where = self.config.uds or f"{self.config.host}:{self.config.port}"
                log.error("cannot listen on %s: %s", where, error)
            self.should_exit = True
            return
        if self.unix is None:
            log.info("listening on http://%s:%d", url_host(self.config.host), self.port())
        gc.collect()
        gc.freeze()  # permanent objects: to scan them again takes 70 ms
        self.is_up.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.exit_status = 130 if sig == signal.SIGINT else 0
        asyncio.get_running_loop().call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:  # the second signal: at once
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._supervisor.drain(self._drain_timeout_s)
        self._app.state.server.events.close()  # their viewers would stay for ever
        self.should_exit = True

    def port(self) -> int:
        """The port in use, also where the setting is 0."""
        return int(self.servers[0].sockets[0].getsockname()[1])


def _where(ready: protocol.WorkerReady | None) -> str:
    """Where the model is, and how much memory is left there: a line, or nothing."""
    if ready is None or not ready.device:
        return ""
    left = "" if ready.free_bytes is None else f"; {_gib(ready.free_bytes)} of memory left"
    return f"On {ready.device}: {_gib(ready.weights_bytes)} of weights{left}\n"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2g} GiB" if size_bytes >= 2**30 else f"{size_bytes >> 20} MiB"


async def _greet(supervisor: Serving, server: _DrainingServer, settings: ServeSettings) -> None:
    """Print the address of the model, with a command that works when pasted."""
    on_demand = isinstance(supervisor, Fleet) and not supervisor.loads_at_start
    ready = None if on_demand else await supervisor.wait_ready()
    await server.is_up.wait()
    url = (
        f"http://{url_host(settings.host)}:{server.port()}"
        if settings.uds is None
        else "http://localhost"
    )
    where = url if settings.uds is None else f"unix:{settings.uds}"
    uds = "" if settings.uds is None else f"--unix-socket {settings.uds} "
    key = " -H 'authorization: Bearer KEY'" if settings.has_keys else ""
    name = ", ".join(_served(supervisor, settings))
    loaded = f" ({ready.card.pipeline}, loaded in {ready.load_s:.1f} s)" if ready else ""
    serving = f"Serving {name}{loaded} at {where}"
    if settings.log_format == "json":
        log.info("%s", serving)
        return
    click.echo(
        f"{serving}\n{_where(ready)}"
        + (f"Playground: {url}/\n" if settings.playground and settings.uds is None else "")
        + "\n"
        f"curl -s {uds}{url}/v1/images/generations -H 'content-type: application/json'{key} \\\n"
        f'  -d \'{{"prompt": "a red circle on a blue background"}}\' \\\n'
        "  | python3 -c 'import base64, json, sys; "
        'sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))\' '
        "> out.png\n"
    )
