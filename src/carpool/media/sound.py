"""Encode sound as WAV, FLAC and MP3.

WAV needs no library: 16 bits a sample, settings in a LIST chunk. FLAC and MP3 need PyAV.
"""

import io
import struct
import wave
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from carpool.artifacts import Sound
from carpool.errors import InvalidValue
from carpool.media.metadata import as_json
from carpool.media.outputs import pyav

SoundFormat = Literal["wav", "flac", "mp3"]
_SOURCE = "made by a model (trainedAlgorithmicMedia)"
_MP3_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)


def encode_sound(
    sound: Sound, format: SoundFormat, metadata: Mapping[str, Any] | None = None
) -> bytes:
    """Encode sound; samples are clipped to -1 to 1.

    Args:
        metadata: see `media.outputs.encode_image`.

    Raises:
        LibraryMissing: the format needs PyAV, which is not installed.
        InvalidValue: the format does not support the number of channels.
    """
    note = None if metadata is None else as_json(metadata) if metadata else _SOURCE
    if format == "wav":
        return _wav(sound, note)
    if len(sound.samples) > 2:
        rule = "wav takes any number of channels"
        raise InvalidValue(
            f"output_format={format}: the sound has {len(sound.samples)} channels: {rule}",
            param="output_format",
        )
    return _with_pyav(sound, format, note)


def _levels(sound: Sound) -> np.ndarray[Any, np.dtype[np.int16]]:
    """16-bit samples, (channels, samples)."""
    return (np.nan_to_num(sound.samples).clip(-1, 1) * 32767).round().astype("<i2")


def _wav(sound: Sound, note: str | None) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(len(sound.samples))
        file.setsampwidth(2)
        file.setframerate(sound.rate)
        file.writeframes(_levels(sound).T.tobytes())
    if note is None:
        return out.getvalue()
    text = note.encode() + b"\0"
    text += bytes(len(text) % 2)
    info = b"INFO" + struct.pack("<4sI", b"ICMT", len(text)) + text
    content = out.getvalue() + struct.pack("<4sI", b"LIST", len(info)) + info
    return content[:4] + struct.pack("<I", len(content) - 8) + content[8:]


def _with_pyav(sound: Sound, format: SoundFormat, note: str | None) -> bytes:
    av, out = pyav("sound other than wav needs"), io.BytesIO()
    layout = "mono" if len(sound.samples) == 1 else "stereo"
    codec, rate = {"flac": ("flac", sound.rate), "mp3": ("libmp3lame", _mp3_rate(sound.rate))}[
        format
    ]
    with av.open(out, "w", format=format) as container:
        if note is not None:
            container.metadata["comment"] = note
        stream = container.add_stream(codec, rate=rate, layout=layout)
        resampler = av.AudioResampler(stream.format, layout, rate)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(_levels(sound)), format="s16p", layout=layout
        )
        frame.sample_rate, frame.pts = sound.rate, 0
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(part))
        container.mux(stream.encode())
    return out.getvalue()


def _mp3_rate(rate: int) -> int:
    """The lowest MP3 sample rate that is at least `rate`; otherwise the highest."""
    return next((rate_hz for rate_hz in _MP3_RATES if rate_hz >= rate), _MP3_RATES[-1])
