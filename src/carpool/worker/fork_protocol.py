"""The protocol between a front and a fork server: one socket with three messages for each worker.

With the first byte, the front passes three descriptors: the worker's socket, its stdout and its
stderr. Then it sends the worker's environment, framed as in `protocol.py`. The fork server answers
with the worker's process id, or a refusal; and after the worker's end, with its exit status. If the
front closes the socket earlier, the worker is killed. This module opens no socket.
"""

import struct
from collections.abc import Callable

import msgspec

from carpool.worker import encoding

REFUSED = 0
"""Sent instead of a process id: the front has to start that worker itself."""

PASSED_DESCRIPTORS = 3
"""Number of descriptors passed with a request."""

_NUMBER = struct.Struct(">i")
NUMBER_BYTES = _NUMBER.size


class ForkRequest(msgspec.Struct):
    """The environment, folder and umask that a worker inherits."""

    environ: dict[bytes, bytes]
    folder: bytes  # its working directory
    umask: int


def encode(request: ForkRequest) -> bytes:
    """Encode a request as a frame: its length, then its body."""
    body = msgspec.msgpack.encode(request)
    return encoding.LENGTH.pack(len(body)) + body


def read(receive: Callable[[int], bytes]) -> ForkRequest:
    """Read one request through a blocking `receive(n)`.

    Raises:
        ConnectionError: it is truncated or invalid.
    """
    body = encoding.read(receive)
    if body is None:
        raise ConnectionError("the front has gone")
    try:
        return msgspec.msgpack.decode(body, type=ForkRequest)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"not a request: {error}") from error


def number(value: int) -> bytes:
    """Encode a process id or an exit status."""
    return _NUMBER.pack(value)


def as_number(content: bytes) -> int:
    """Decode a process id or an exit status."""
    [value] = _NUMBER.unpack(content)
    return int(value)
