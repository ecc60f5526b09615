"""Convert outputs of pipelines to raw pixels, samples and vertices for the front."""

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from carpool.artifacts import Sound
from carpool.errors import PipelineFailed
from carpool.worker import protocol
from carpool.worker.raw_artifacts import RawMesh, RawSound


def raw_output(fields: Mapping[str, Any], *, spool: bytes) -> dict[str, Any]:
    """Convert a pipeline's output to raw pixels, samples or vertices: one field of `Done`."""
    from carpool.engine.model.artifacts import mesh_of, sound_of  # imports torch

    if "finish_reason" in fields:
        return {"text": protocol.RawText(**fields)}
    sound = sound_of(fields)
    if "frames" in fields:
        return {"clip": _clip(fields, sound, spool)}
    if (mesh := mesh_of(fields)) is not None:
        colours = b"" if mesh.colours is None else mesh.colours.tobytes()
        places = b"" if mesh.places is None else mesh.places.tobytes()
        parts = mesh.vertices.tobytes(), mesh.faces.tobytes(), colours, places, mesh.texture
        return {"mesh": RawMesh(*parts)}
    if not fields.get("images") and sound is not None:
        samples = sound.samples.tobytes()
        return {"sound": RawSound(samples, len(sound.samples), sound.rate)}
    return {"pictures": _pictures(fields)}


def _clip(fields: Mapping[str, Any], sound: Sound | None, spool: bytes) -> protocol.RawVideo:
    [video] = fields["frames"]
    width, height = video[0].size
    clip = protocol.RawVideo(width, height, len(video), b"")
    if sound is not None:
        clip.sound, clip.channels = sound.samples.tobytes(), len(sound.samples)
        clip.rate = sound.rate
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
    if not fields.get("images"):
        raise PipelineFailed("the pipeline returned no images")
    return [
        protocol.Picture(image.width, image.height, image.convert("RGB").tobytes())
        for image in fields["images"]
    ]
