"""What the front and a worker say to each other: msgpack messages, each after its length.

A dead peer is an end of file on the socket, seen at once. Nothing here opens a socket.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from carpool.config import EngineSettings
from carpool.parameters import Card
from carpool.types import Job, Timings

LENGTH = struct.Struct(">I")


class Load(msgspec.Struct, tag="load"):
    """First message to a worker: what to run."""

    model: str
    settings: EngineSettings


class Submit(msgspec.Struct, tag="submit"):
    job: Job


class Cancel(msgspec.Struct, tag="cancel"):
    request_id: str


class AskStatistics(msgspec.Struct, tag="ask"):
    pass


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded and takes requests."""

    card: Card
    versions: dict[str, str]  # of the libraries that make the pictures
    load_s: float


class CannotLoad(msgspec.Struct, tag="cannot_load"):
    message: str


class Picture(msgspec.Struct):
    width: int
    height: int
    rgb: bytes  # 3 * width * height


class Usage(msgspec.Struct):
    """What a request took in and gave, in the tokens of its own model."""

    text_tokens: int
    image_tokens: int


class Done(msgspec.Struct, tag="done"):
    request_id: str
    seed: int
    pictures: list[Picture]
    timings: Timings
    usage: Usage


class Failed(msgspec.Struct, tag="failed"):
    request_id: str
    error: str  # name of its class in `carpool.errors`
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Statistics(msgspec.Struct, tag="statistics"):
    statistics: dict[str, Any]


ToWorker = Load | Submit | Cancel | AskStatistics
ToFront = Ready | CannotLoad | Done | Failed | Statistics

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_front = msgspec.msgpack.Decoder(ToFront)


def encode(message: ToWorker | ToFront) -> bytes:
    """A whole frame."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_to_worker(body: bytes) -> ToWorker:
    message: ToWorker = _to_worker.decode(body)
    return message


def decode_to_front(body: bytes) -> ToFront:
    message: ToFront = _to_front.decode(body)
    return message


def read(receive: Callable[[int], bytes]) -> bytes | None:
    """Read one frame's body through a blocking `receive(n) -> at most n bytes`; None at the end."""
    header = _exactly(receive, LENGTH.size)
    return None if header is None else _exactly(receive, LENGTH.unpack(header)[0])


def _exactly(receive: Callable[[int], bytes], size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = receive(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
