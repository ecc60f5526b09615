"""Listening sockets: as many connections a turn of the event loop as asyncio is told to accept.

Where descriptors run out, asyncio stops listening for a second. Up to Python 3.13 it first tries
again for each connection that it may accept in that turn; each failure is a line in the log and
another timer, and more of them follow with every second. Here the first failure is the turn's last.
"""

import errno
import socket
import time
from typing import Any

WAITING = 2048  # connections that the kernel keeps until they are accepted, as uvicorn has it
ACCEPTED = 256
"""Connections accepted in a turn of the event loop: some 10 ms of it. With half as many, a burst
of 375 waits for two turns more; with twice as many, for one."""
_PAUSE_S = 0.5  # asyncio's own is a second; a second failure in it is no news
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ListeningSocket(socket.socket):
    """A listening socket that says once a second that descriptors have run out."""

    _resumes_s = 0.0  # `time.monotonic`

    def listen(self, backlog: int = WAITING) -> None:
        """Listen. `asyncio` has one number for the kernel's queue and for accepting: `ACCEPTED`."""
        super().listen(max(backlog, WAITING))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            BlockingIOError: there is none, or descriptors have run out just now.
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
        socket.gaierror, UnicodeError: it has none.
        OSError: an address is taken or needs privileges, or none is of this machine.
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
