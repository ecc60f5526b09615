"""Start-up of `carpool serve`: check the address, set limits of the process, print the address."""

import contextlib
import ctypes
import errno
import logging
import os
import resource
import socket
import sys
from collections.abc import Collection

import click

from carpool.config import ServeSettings
from carpool.errors import LoadFailed
from carpool.fleet.fleet import Fleet
from carpool.fleet.serving import Serving
from carpool.server.draining import DrainingServer, url_host
from carpool.server.transport.listening import listen_on
from carpool.worker import protocol

log = logging.getLogger("carpool")

_SWITCH_S = 0.001  # the event loop's longest wait for another thread's Python; usually 5 ms
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 20  # as malloc.h numbers it


def check_address(settings: ServeSettings) -> None:
    """Bind the address and release it, before anything is opened or loaded.

    Raises:
        LoadFailed: the port is taken, or the address is not one of this machine.
    """
    if settings.uds is not None:
        return
    host, port = settings.host, settings.port
    try:
        for listening in listen_on(host, port):
            listening.close()
    except (socket.gaierror, UnicodeError) as error:
        raise LoadFailed(f"host={host!r} is no address: {error}") from error
    except OSError as error:
        told = {
            errno.EADDRINUSE: f"port {port} is taken; use --port for another one (address already "
            "in use)",
            errno.EACCES: f"port {port} needs privileges; use --port for one above 1023",
            errno.EADDRNOTAVAIL: f"host={host!r} is no address of this machine; 0.0.0.0 is all of "
            "them",
        }.get(error.errno or 0, f"host={host!r}, port={port}: {error}")
        raise LoadFailed(told) from error


def set_limits() -> None:
    """Set what the kernel and the C library allow this process.

    The usual soft limit of descriptors, 1,024, is less than the requests that may wait. And glibc
    is to map every large buffer, and unmap it when it is freed: by default it stops that after the
    first ones, and clients' pictures would stay in the front's memory.
    """
    os.umask(0o077)  # jobs and pictures are private
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "infinite" and means fewer
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    sys.setswitchinterval(_SWITCH_S)


def served_names(serving: Serving, settings: ServeSettings) -> Collection[str]:
    """The names of the models, once they are known."""
    if isinstance(serving, Fleet):
        return serving.deployments
    return [settings.served_model_name or (serving.ready.card.id if serving.ready else "")]


def say(settings: ServeSettings, text: str, *, is_error: bool = False) -> None:
    """Print a line for the person who started the server; log it where logs are JSON."""
    if settings.log_format == "json":
        log.log(logging.ERROR if is_error else logging.INFO, "%s", text)
    else:
        click.echo(f"carpool: {text}" if is_error else text, err=True)


def _where(ready: protocol.WorkerReady | None) -> str:
    """The model's device and the memory left there: a line, or nothing."""
    if ready is None or not ready.device:
        return ""
    left = "" if ready.free_bytes is None else f"; {_gib(ready.free_bytes)} of memory left"
    return f"On {ready.device}: {_gib(ready.weights_bytes)} of weights{left}\n"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2g} GiB" if size_bytes >= 2**30 else f"{size_bytes >> 20} MiB"


async def greet(backend: Serving, server: DrainingServer, settings: ServeSettings) -> None:
    """Print the address of the model, with a command that works when pasted."""
    on_demand = isinstance(backend, Fleet) and not backend.loads_at_start
    ready = None if on_demand else await backend.wait_ready()
    await server.is_up.wait()
    url = (
        f"http://{url_host(settings.host)}:{server.port()}"
        if settings.uds is None
        else "http://localhost"
    )
    where = url if settings.uds is None else f"unix:{settings.uds}"
    uds = "" if settings.uds is None else f"--unix-socket {settings.uds} "
    key = " -H 'authorization: Bearer KEY'" if settings.has_keys else ""
    name = ", ".join(served_names(backend, settings))
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
