"""Encode and decode the messages between the front and a worker: msgpack, with a length before it.

Input images are sent inside a request's arguments, as raw pixels; meshes and sound as arrays. This
module opens no socket.
"""

import struct
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec
import numpy as np
from PIL import Image

from carpool.worker.protocol import ForkRequest, Picture, ToFront, ToWorker

LENGTH = struct.Struct(">I")
NUMBER = struct.Struct(">i")  # a process id or an exit status


def image_of(picture: Picture) -> Image.Image:
    """A picture as a PIL image."""
    return Image.frombytes("RGB", (picture.width, picture.height), bytes(picture.rgb))


_PICTURE = 1  # msgpack extension code of a PIL image: mode, size, pixels
_ARRAY = 2  # of an array: type, shape, content
Undecodable = msgspec.DecodeError
"""Raised by all functions that decode a message: the other end violates the protocol."""
_PACKED = "carpool-packed"  # key in the `info` of an image that is already packed


def pack(picture: Image.Image) -> Image.Image:
    """Encode an image in advance, for example on a thread; returns the image."""
    picture.info[_PACKED] = _packed(picture)
    return picture


def _packed(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, np.ndarray):
        content = value.dtype.str, value.shape, value.tobytes()
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(content))
    if not isinstance(value, Image.Image):
        raise TypeError(f"a {type(value).__name__} cannot be sent to a worker")
    if (packed := value.info.get(_PACKED)) is not None:
        assert isinstance(packed, msgspec.msgpack.Ext)
        return packed
    parts = (value.mode, value.size, value.tobytes())
    return msgspec.msgpack.Ext(_PICTURE, msgspec.msgpack.encode(parts))


def _unpacked(code: int, data: memoryview) -> Any:
    kind, size, content = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    try:
        if code == _PICTURE:
            width, height = size
            return Image.frombytes(kind, (width, height), content)
        return np.frombuffer(content, kind).reshape(size)
    except (TypeError, ValueError) as error:
        raise Undecodable(f"an array of {size}, type {kind!r}: {error}") from error


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
decode_to_worker: Callable[[bytes], ToWorker]
decode_to_worker = msgspec.msgpack.Decoder(ToWorker, ext_hook=_unpacked).decode
decode_to_front: Callable[[bytes], ToFront]
decode_to_front = msgspec.msgpack.Decoder(ToFront, ext_hook=_unpacked).decode
decode_fork_request = msgspec.msgpack.Decoder(ForkRequest).decode


def encode_body(message: ToWorker | ToFront | ForkRequest) -> bytes:
    """Encode a message without its length, for a transport with its own framing."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:  # a path that is not UTF-8, as in the text of an error
        return _encoder.encode(_escaped(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _escaped(value: Any) -> Any:
    """Copy a value, with invalid Unicode in texts replaced by escapes."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(name): _escaped(inner) for name, inner in value.items()}
    return list(map(_escaped, value)) if isinstance(value, (list, tuple)) else value


def encode(message: ToWorker | ToFront | ForkRequest) -> bytes:
    """Encode a message as a frame: its length, then its body."""
    body = encode_body(message)
    return LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> bytes | None:
    """Read the body of one frame from a blocking stream; None at its end."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    body = stream.read(size := LENGTH.unpack(header)[0])
    return body if len(body) == size else None
