"""Converts outputs of pipelines into raw pixels and samples, as they are sent to the front."""

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from carpool.errors import PipelineFailed
from carpool.worker import protocol

RawOutput = tuple[list[protocol.Picture], protocol.RawVideo | None]


def raw_output(fields: Mapping[str, Any], *, pipe: Any, spool: bytes) -> RawOutput:
    """Convert a pipeline's output into raw pixels and samples."""
    if "frames" not in fields:
        return _pictures(fields), None
    [video] = fields["frames"]
    width, height = video[0].size
    sound, channels, rate = _sound(fields, pipe)
    raw_video = protocol.RawVideo(
        width, height, len(video), b"", sound=sound, channels=channels, rate=rate
    )
    raw = (frame.convert("RGB").tobytes() for frame in video)
    if spool and 3 * width * height * len(video) > protocol.MOST_INLINE_BYTES:
        prefix = f"{os.getpid()}-".encode()
        handle, raw_video.path = tempfile.mkstemp(b".rgb", prefix, spool)
        try:
            with open(handle, "wb") as file:
                file.writelines(raw)
        except OSError:
            os.unlink(raw_video.path)
            raise
    else:
        raw_video.rgb = b"".join(raw)
    return [], raw_video


def _sound(fields: Mapping[str, Any], pipe: Any) -> tuple[bytes, int, int]:
    """Samples, channels and rate of a video's sound; no samples where it has none."""
    if fields.get("audio") is None:
        return b"", 1, 0
    [samples] = fields["audio"].float()  # (channels, samples)
    rate = int(pipe.vocoder.config.output_sampling_rate)
    return samples.contiguous().numpy().tobytes(), len(samples), rate


def _pictures(fields: Mapping[str, Any]) -> list[protocol.Picture]:
    if not fields.get("images"):
        raise PipelineFailed("the pipeline gave no pictures")
    return [
        protocol.Picture(image.width, image.height, image.convert("RGB").tobytes())
        for image in fields["images"]
    ]
