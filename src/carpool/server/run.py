"""`carpool serve`: the front and its worker, from start to drained end."""

import asyncio
import logging
import signal
import socket
from types import FrameType

import click
import uvicorn

from carpool.config import ServeSettings
from carpool.errors import LoadFailed
from carpool.server.app import create_app
from carpool.supervise import Supervisor

log = logging.getLogger("carpool")


def serve(model: str, settings: ServeSettings) -> int:
    """Serve until a signal says to stop; gives the exit status of the process."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    return asyncio.run(_serve(model, settings))


async def _serve(model: str, settings: ServeSettings) -> int:
    supervisor = Supervisor(model, settings.engine())
    server = _Server(supervisor, settings)
    click.echo(f"Loading {model} ...", err=True)
    worker = supervisor.start()
    http = asyncio.create_task(server.serve())
    greeting = asyncio.create_task(_greet(supervisor, server, settings))
    try:
        await asyncio.wait({worker, http}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done() and not worker.cancelled() and (error := worker.exception()):
            if not isinstance(error, LoadFailed):
                raise error
            click.echo(f"carpool: {error}", err=True)
            return 1
        return server.exit_status if server.started else 1
    finally:
        greeting.cancel()
        server.should_exit = True
        await asyncio.wait({http})
        await supervisor.stop()


class _Server(uvicorn.Server):
    """Uvicorn, but a signal first drains: new requests are refused while running ones finish."""

    def __init__(self, supervisor: Supervisor, settings: ServeSettings) -> None:
        app = create_app(supervisor, settings)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_level=settings.log_level,
                log_config=None,
                timeout_graceful_shutdown=5,
                lifespan="off",
            )
        )
        self._supervisor, self._drain_timeout_s = supervisor, settings.drain_timeout
        self._draining: asyncio.Task[None] | None = None
        self.exit_status = 0
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except (SystemExit, OverflowError) as error:  # uvicorn's way to say: the port is taken
            if isinstance(error, OverflowError):
                log.error("cannot listen on %s:%s: %s", self.config.host, self.config.port, error)
            self.should_exit = True
            return
        self.is_up.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.exit_status = 130 if sig == signal.SIGINT else 0
        asyncio.get_running_loop().call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:  # told twice: now
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._supervisor.drain(self._drain_timeout_s)
        self.should_exit = True

    def port(self) -> int:
        """The port that is really listened on."""
        return int(self.servers[0].sockets[0].getsockname()[1])


async def _greet(supervisor: Supervisor, server: _Server, settings: ServeSettings) -> None:
    """Say where the model is served, with a line that works when pasted."""
    ready = await supervisor.wait_ready()
    await server.is_up.wait()
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{server.port()}"
    key = " -H 'authorization: Bearer KEY'" if settings.api_key else ""
    click.echo(
        f"Serving {settings.served_model_name or ready.card.id} ({ready.card.pipeline}, loaded in "
        f"{ready.load_s:.1f} s) at {url}\n\n"
        f"curl -s {url}/v1/images/generations -H 'content-type: application/json'{key} \\\n"
        f'  -d \'{{"prompt": "a red circle on a blue background"}}\' \\\n'
        "  | python3 -c 'import base64, json, sys; "
        'sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))\' '
        "> out.png\n"
    )
