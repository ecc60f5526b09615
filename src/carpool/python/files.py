"""Write outputs to files, in the format of the file extension."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from carpool.errors import PipelineFailed
from carpool.jobs.database import Record
from carpool.media.mesh import MeshFormat, encode_mesh, files_beside
from carpool.media.metadata import with_used
from carpool.media.outputs import Format, encode_image, write_mp4
from carpool.media.sound import SoundFormat, encode_sound
from carpool.python.handle import Output


def write_output(
    output: Output, path: Path, fps: float, metadata: Mapping[str, Any] | None, quality: int = 100
) -> None:
    """Write an output, and the files of a mesh or further layers (`out-1.png`) beside it.

    Args:
        fps: frames a second of a video.
        metadata: see `media.encode_image`.
        quality: JPEG and WebP quality, 0-100.

    Raises:
        PipelineFailed: the output has no mesh or no sound.
    """
    format: Any = path.suffix[1:].lower()
    if format == "mp4":
        [video] = output.frames
        pixels = np.stack([np.asarray(frame.convert("RGB")) for frame in video])
        audio = None if (sound := output.sound) is None else (sound.samples, sound.rate)
        write_mp4(pixels, fps, audio, path, metadata=metadata)
    elif format in get_args(MeshFormat):
        if (mesh := output.mesh) is None:
            raise PipelineFailed("the pipeline gave no mesh")
        path.write_bytes(encode_mesh(mesh, format, metadata, stem=path.stem))
        for name, content in files_beside(mesh, format, path.stem).items():
            path.with_name(name).write_bytes(content)
    elif format in get_args(SoundFormat):
        if (sound := output.sound) is None:
            raise PipelineFailed("the pipeline gave no sound")
        path.write_bytes(encode_sound(sound, format, metadata))
    else:
        kind: Format = "jpeg" if format == "jpg" else format
        first = output.images[0]
        for number, layer in enumerate(first if isinstance(first, list) else [first]):
            place = path.with_stem(f"{path.stem}-{number}") if number else path
            place.write_bytes(encode_image(layer, kind, quality, metadata))


def write_job(record: Record, results: Sequence[Output], folder: Path) -> None:
    """Write the files of a job: `0.png`, `1.png`, ..."""
    form = record.work["output"]
    for i, (output, data) in enumerate(zip(results, form["told"], strict=True)):
        metadata, format = with_used(data, output.settings), form["format"]
        if record.kind == "video":
            metadata, format = with_used(data, {**output.settings, "fps": form["fps"]}), "mp4"
        elif record.kind == "image" and metadata:
            metadata |= {"width": output.images[0].width, "height": output.images[0].height}
        write_output(output, folder / f"{i}.{format}", form["fps"], metadata)
