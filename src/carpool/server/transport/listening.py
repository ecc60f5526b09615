"""Listening sockets that limit the connections accepted in one turn of the event loop.

When descriptors run out, asyncio stops listening for a second. Up to Python 3.13 it first retries
for each connection that it may accept in that turn; each failure logs a line and starts another
timer, and these multiply every second. Here the first failure ends the turn.
"""

import errno
import socket
import time
from typing import Any

WAITING = 2048  # backlog of the kernel, as in uvicorn
ACCEPTED = 256
"""Connections accepted in one turn of the event loop, about 10 ms. A burst of 375 connections takes
two turns; at half this value it takes three turns, at twice one turn."""
_PAUSE_S = 0.5  # asyncio pauses 1 s; failures within it are not logged again
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ListeningSocket(socket.socket):
    """A listening socket that reports exhausted descriptors once a second."""

    _resumes_s = 0.0  # `time.monotonic`

    def listen(self, backlog: int = WAITING) -> None:
        """Listen with a backlog of `WAITING` or more: asyncio passes `ACCEPTED` for both limits."""
        super().listen(max(backlog, WAITING))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            BlockingIOError: no connection waits, or descriptors have just run out.
            OSError: descriptors have run out.
        """
        if time.monotonic() < self._resumes_s:
            raise BlockingIOError(errno.EAGAIN, "descriptors have run out")
        try:
            return super().accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._resumes_s = time.monotonic() + _PAUSE_S
            raise


def listen_on(host: str, port: int) -> list[ListeningSocket]:
    """Listen on all addresses of a host.

    Raises:
        socket.gaierror, UnicodeError: the host has no address.
        OSError: an address is taken or needs privileges, or none belongs to this machine.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[ListeningSocket] = []
    foreign: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        try:
            plain = socket.create_server(address, family=family)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                foreign = error  # localhost without IPv6
                continue
            for listener in sockets:
                listener.close()
            raise
        sockets.append(ListeningSocket(family, kind, protocol, fileno=plain.detach()))
        sockets[-1].listen()
    if foreign is not None and not sockets:
        raise foreign
    return sockets
