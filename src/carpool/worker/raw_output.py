"""Convert outputs of pipelines to plain data for the front: pixels are raw, in memory or a file."""

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from carpool.artifacts import Sound
from carpool.errors import PipelineFailed
from carpool.worker import protocol


def raw_output(fields: Mapping[str, Any], *, spool: bytes) -> dict[str, Any]:
    """Convert a pipeline's output to one field of `Done`."""
    from carpool.engine.model.artifacts import mesh_of, sound_of  # imports torch

    if "finish_reason" in fields:
        return {"text": protocol.RawText(**fields)}
    sound = sound_of(fields)
    if "frames" in fields:
        return {"clip": _clip(fields, sound, spool)}
    if (mesh := mesh_of(fields)) is not None:
        return {"mesh": mesh}
    if not fields.get("images") and sound is not None:
        return {"sound": sound}
    return {"pictures": _pictures(fields)}


def _clip(fields: Mapping[str, Any], sound: Sound | None, spool: bytes) -> protocol.RawVideo:
    [video] = fields["frames"]
    width, height = video[0].size
    clip = protocol.RawVideo(width, height, len(video), b"", sound=sound)
    raw = (frame.convert("RGB").tobytes() for frame in video)
    if spool and 3 * width * height * len(video) > protocol.MOST_INLINE_BYTES:
        prefix = f"{os.getpid()}-".encode()
        handle, clip.path = tempfile.mkstemp(b".rgb", prefix, spool)
        try:
            with open(handle, "wb") as file:
                file.writelines(raw)
        except OSError:
            os.unlink(clip.path)
            raise
    else:
        clip.rgb = b"".join(raw)
    return clip


def _pictures(fields: Mapping[str, Any]) -> list[protocol.Picture]:
    images = fields.get("images")
    if not images or isinstance(images[0], list):  # of layers, whose alpha would be lost
        raise PipelineFailed("the pipeline returned no images, or layers, which are not sent")
    pictures = [(image.width, image.height, image.convert("RGB").tobytes()) for image in images]
    return [protocol.Picture(*picture) for picture in pictures]
