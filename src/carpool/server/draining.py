"""The HTTP server of `carpool serve`: uvicorn with strict HTTP that drains on a signal."""

import asyncio
import gc
import logging
import signal
import socket
from pathlib import Path
from types import FrameType

import uvicorn

from carpool.config import ServeSettings
from carpool.fleet.fleet import Fleet
from carpool.jobs.runner import Runner
from carpool.server.access.keys import Keyring
from carpool.server.app import create_app
from carpool.server.transport.http_protocol import StrictHTTPProtocol
from carpool.server.transport.listening import ACCEPTED, UnixSocket, listen_on
from carpool.telemetry.tracing import Tracing

log = logging.getLogger("carpool")


class DrainingServer(uvicorn.Server):
    """Uvicorn that drains on a signal: it refuses new requests and finishes running requests."""

    def __init__(
        self,
        fleet: Fleet,
        settings: ServeSettings,
        runner: Runner,
        keys: Keyring,
        traces: Tracing,
    ) -> None:
        app = create_app(fleet, settings, runner, keys=keys, traces=traces)
        super().__init__(
            uvicorn.Config(
                app,
                http=StrictHTTPProtocol,
                ws="none",
                host=settings.host,
                port=settings.port,
                uds=settings.uds,
                forwarded_allow_ips="*" if settings.uds else None,  # a proxy connects
                backlog=ACCEPTED,
                access_log=False,  # `RequestLogging` logs more
                # hides uvicorn's start and stop messages: ours say the same
                log_level="warning" if settings.log_level == "info" else settings.log_level,
                log_config=None,
                timeout_keep_alive=StrictHTTPProtocol.idle_timeout_s,
                timeout_graceful_shutdown=5,
                lifespan="off",
            )
        )
        self._app = app
        self._fleet, self._drain_timeout_s = fleet, settings.drain_timeout
        self._draining: asyncio.Task[None] | None = None
        self.exit_status = 0
        self.is_up = asyncio.Event()
        self.unix: UnixSocket | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            if self.config.uds is not None:
                self.unix = await asyncio.to_thread(UnixSocket, Path(self.config.uds))
                listening = [self.unix.socket]
                log.info("listening on %s", self.config.uds)
            else:
                config = self.config
                listening = await asyncio.to_thread(listen_on, config.host, config.port)
            await super().startup([*listening])
        except (OverflowError, OSError) as error:
            where = self.config.uds or f"{self.config.host}:{self.config.port}"
            log.error("cannot listen on %s: %s", where, error)
            self.should_exit = True
            return
        if self.unix is None:
            log.info("listening on http://%s:%d", url_host(self.config.host), self.port())
        gc.collect()
        gc.freeze()  # permanent objects: each new scan takes 70 ms
        self.is_up.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.exit_status = 130 if sig == signal.SIGINT else 0
        asyncio.get_running_loop().call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:  # the second signal stops at once
            self.should_exit = self.force_exit = True
            while self.servers:  # uvicorn waits for their connections since Python 3.12
                self.servers.pop().close()

    async def _drain(self) -> None:
        await self._fleet.drain(self._drain_timeout_s)
        self._app.state.server.events.close()  # otherwise viewers never disconnect
        self.should_exit = True

    def port(self) -> int:
        """The port in use, even if the setting is 0."""
        return int(self.servers[0].sockets[0].getsockname()[1])


def url_host(host: str) -> str:
    """A host in URL form: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
