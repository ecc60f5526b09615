"""What the front and a worker say to each other: msgpack messages, each after its length.

Pictures of a request cross inside its arguments, as their pixels.

A dead peer is an end of file on the socket, seen at once. Nothing here opens a socket.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec
from PIL import Image

from carpool.config import EngineSettings, LogFormat, LogLevel
from carpool.request.parameters import Card
from carpool.types import CheckedRequest, Timings

LENGTH = struct.Struct(">I")
MOST_INLINE_BYTES = 64 << 20  # a larger output crosses as a file: others' frames need not wait


class Load(msgspec.Struct, tag="load"):
    """First message to a worker: what to run."""

    model: str
    settings: EngineSettings
    passing: str = ""  # folder for outputs too large for a frame; nothing: all cross in frames
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    log_prompts: bool = False
    otel: bool = False  # send traces


class Submit(msgspec.Struct, tag="submit"):
    job: CheckedRequest
    follow: bool = False  # tell the front of every step
    trace: str = ""  # context of the front's span, as in the header `traceparent`


class Cancel(msgspec.Struct, tag="cancel"):
    request_id: str


class AskStatistics(msgspec.Struct, tag="ask"):
    pass


class AskLives(msgspec.Struct, tag="ask_lives"):
    request_ids: list[str]


class Reload(msgspec.Struct, tag="reload"):
    """Read again what may change while the worker runs: adapters' folder, batching config."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded and takes requests."""

    card: Card
    versions: dict[str, str]  # of the libraries that make the pictures
    load_s: float


class Reloaded(msgspec.Struct, tag="reloaded"):
    """Answers `Reload`: the model as it is served by now, and what could not be taken."""

    card: Card
    problems: list[str]


class CannotLoad(msgspec.Struct, tag="cannot_load"):
    message: str


class Picture(msgspec.Struct):
    width: int
    height: int
    rgb: bytes  # 3 * width * height


class Clip(msgspec.Struct):
    """A video, with its sound where the model makes it. The front removes the file at `path`."""

    width: int
    height: int
    length: int  # frames
    rgb: bytes  # 3 * width * height * length; nothing if they lie in a file
    path: str = ""
    sound: bytes = b""  # float32 of the machine, (channels, samples)
    channels: int = 1
    rate: int = 0  # samples a second


class Progress(msgspec.Struct, tag="progress"):
    """A denoising step of a followed request is done."""

    request_id: str
    step: int
    steps: int


class Preview(msgspec.Struct, tag="preview"):
    """What a request is going to be, as far as one can see after some of its steps."""

    request_id: str
    step: int
    steps: int
    picture: Picture


class Started(msgspec.Struct, tag="started"):
    """A request has left the line: whatever happens now, it may be why."""

    request_id: str


class Beat(msgspec.Struct, tag="beat"):
    """The worker is there, and what its engine does."""

    stalled_s: float  # since it last did something; 0 where there is nothing to do
    expected_s: float | None  # what it does now is likely to take; None: nobody knows
    place_s: float | None = None  # when the next place is likely to be free; None: the same


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
    clip: Clip | None = None  # instead of pictures, of a model that makes videos


class Failed(msgspec.Struct, tag="failed"):
    request_id: str
    error: str  # name of its class in `carpool.errors`
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Statistics(msgspec.Struct, tag="statistics"):
    statistics: dict[str, Any]


class Lives(msgspec.Struct, tag="lives"):
    """What was asked for, in that order; without those that are not known any more."""

    lives: list[dict[str, Any]]


ToWorker = Load | Submit | Cancel | AskStatistics | AskLives | Reload
ToFront = (
    Ready
    | CannotLoad
    | Beat
    | Started
    | Progress
    | Preview
    | Done
    | Failed
    | Statistics
    | Lives
    | Reloaded
)

_PICTURE = 1  # code of the extension type that a PIL image crosses as: mode, size, pixels
_CROSSING = "carpool-crossing"  # in the `info` of one that has been packed before


def pack(picture: Image.Image) -> Image.Image:
    """Do beforehand, on a thread, what takes long when a picture is sent. Gives it back."""
    picture.info[_CROSSING] = _packed(picture)
    return picture


def _packed(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, Image.Image):
        raise TypeError(f"a {type(value).__name__} cannot cross")
    if (packed := value.info.get(_CROSSING)) is not None:
        assert isinstance(packed, msgspec.msgpack.Ext)
        return packed
    parts = (value.mode, value.size, value.tobytes())
    return msgspec.msgpack.Ext(_PICTURE, msgspec.msgpack.encode(parts))


def _unpacked(code: int, data: memoryview) -> Any:
    if code != _PICTURE:
        raise ValueError(f"unknown extension {code}")
    mode, size, pixels = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, int], bytes])
    return Image.frombytes(mode, size, pixels)


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
_to_worker = msgspec.msgpack.Decoder(ToWorker, ext_hook=_unpacked)
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
