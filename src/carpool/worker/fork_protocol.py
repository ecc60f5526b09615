"""The protocol between a front and a fork server: one socket, and on it three messages, a worker.

With the first byte, the front passes three descriptors: the worker's socket, its stdout and its
stderr. Then it sends what the worker inherits, framed as in `protocol.py`. The fork server answers
with the worker's process id, or that it refuses; and when the worker has ended, with its exit
status. A front that closes the socket before has the worker killed. Nothing here opens a socket.
"""

import struct
from collections.abc import Callable

import msgspec

from carpool.worker import protocol

REFUSED = 0
"""Sent instead of a process id: the front has to start that worker by itself."""

PASSED_DESCRIPTORS = 3
"""Descriptors that come with a request."""

_NUMBER = struct.Struct(">i")
NUMBER_BYTES = _NUMBER.size


class ForkRequest(msgspec.Struct):
    """The environment, folder and umask that a worker inherits."""

    environ: dict[bytes, bytes]
    folder: bytes  # it runs in
    umask: int


def encode(request: ForkRequest) -> bytes:
    """Encode a request as a frame: its length, then its body."""
    body = msgspec.msgpack.encode(request)
    return protocol.LENGTH.pack(len(body)) + body


def read(receive: Callable[[int], bytes]) -> ForkRequest:
    """Read one request through a blocking `receive(n)`.

    Raises:
        ConnectionError: it ends in the middle, or is none.
    """
    body = protocol.read(receive)
    if body is None:
        raise ConnectionError("the front has gone")
    try:
        return msgspec.msgpack.decode(body, type=ForkRequest)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"not a request: {error}") from error


def number(value: int) -> bytes:
    """A process id or an exit status, as it is sent."""
    return _NUMBER.pack(value)


def as_number(content: bytes) -> int:
    """A process id or an exit status that was sent."""
    [value] = _NUMBER.unpack(content)
    return int(value)
