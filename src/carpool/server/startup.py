"""Start-up of `carpool serve`: checks the address, sets process limits, prints messages."""

import contextlib
import ctypes
import errno
import logging
import os
import resource
import socket
import sys

import click

from carpool.config import ServeSettings
from carpool.errors import LoadFailed
from carpool.server.transport.listening import listen_on

log = logging.getLogger("carpool")

_SWITCH_S = 0.001  # longest wait of the event loop for the GIL; Python's default: 5 ms
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 20  # the number in malloc.h


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
        events = {
            errno.EADDRINUSE: f"port {port} is taken; use --port for another one (address already "
            "in use)",
            errno.EACCES: f"port {port} needs privileges; use --port for one above 1023",
            errno.EADDRNOTAVAIL: f"host={host!r} is no address of this machine; 0.0.0.0 is all of "
            "them",
        }.get(error.errno or 0, f"host={host!r}, port={port}: {error}")
        raise LoadFailed(events) from error


def set_limits() -> None:
    """Set limits of the kernel and the C library for this process.

    More requests may wait than the usual soft limit of 1,024 descriptors allows. And glibc should
    map every large buffer and unmap it when it is freed: by default it stops that after the first
    few, so clients' pictures would stay in the front's memory.
    """
    os.umask(0o077)  # jobs and pictures are private
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS reports "infinite" but allows fewer
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    sys.setswitchinterval(_SWITCH_S)


def say(settings: ServeSettings, text: str, *, is_error: bool = False) -> None:
    """Print a line on the terminal, or log it if logs are JSON."""
    if settings.log_format == "json":
        log.log(logging.ERROR if is_error else logging.INFO, "%s", text)
    else:
        click.echo(f"carpool: {text}" if is_error else text, err=True)
