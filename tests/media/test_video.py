"""Videos play as they were drawn, with their sound; small pictures of them show what is in them."""

import io
import json
import os
import platform
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from carpool.artifacts import Sound
from carpool.errors import InvalidValue
from carpool.media import encode_sound
from carpool.media.outputs import Audio, encode_video, spritesheet, thumbnail, write_mp4

COLOURS = ("red", "lime", "blue", "white", "black")
RATE = 16_000


def frames(count: int, width: int = 48, height: int = 32) -> NDArray[np.uint8]:
    """Frame i has the i-th colour all over."""
    pictures = [Image.new("RGB", (width, height), COLOURS[i % 5]) for i in range(count)]
    return np.stack([np.asarray(picture) for picture in pictures])


def tone(channels: int, seconds: float, hertz: float = 440) -> Audio:
    times = np.arange(int(seconds * RATE)) / RATE
    wave = 0.5 * np.sin(2 * np.pi * hertz * times).astype(np.float32)
    return np.stack([wave] * channels), RATE


def shown(file: Path | bytes) -> list[Any]:
    with av.open(io.BytesIO(file) if isinstance(file, bytes) else str(file), "r") as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def near(picture: Image.Image | NDArray[np.uint8], colour: str) -> bool:
    mean = np.asarray(picture).reshape(-1, 3).mean(axis=0)
    return bool(abs(mean - np.asarray(Image.new("RGB", (1, 1), colour))).max() < 12)


def boxes(mp4: bytes) -> list[tuple[bytes, bytes]]:
    """The outermost boxes of an MP4: name, content."""
    found, at = [], 0
    while at < len(mp4):
        size = int.from_bytes(mp4[at : at + 4], "big")
        found.append((mp4[at + 4 : at + 8], mp4[at + 8 : at + size]))
        at += size
    return found


def test_a_video_plays_as_it_was_drawn_and_says_how_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"

    write_mp4(frames(5, 48, 33), 12, None, path, metadata={"prompt": "a cat", "seed": 7})

    with av.open(str(path)) as container:
        assert container.streams.video[0].average_rate == 12
        assert not container.streams.audio
        assert json.loads(container.metadata["comment"]) == {"prompt": "a cat", "seed": 7}
    pictures = shown(path)
    assert [picture.shape for picture in pictures] == [(32, 48, 3)] * 5
    assert all(map(near, pictures, COLOURS))


WRITES = """
import hashlib, io, sys
import numpy as np
from carpool.media.outputs import write_mp4
for side in (48, 80, 160):
    ramp = np.add.outer(np.arange(9), np.arange(side * side * 3)).reshape(9, side, side, 3)
    drawn = (ramp // 7 + np.random.default_rng(0).integers(0, 7, ramp.shape)) % 256
    file = io.BytesIO()
    write_mp4(drawn.astype(np.uint8), 16, None, file)
    print(side, hashlib.sha256(file.getvalue()).hexdigest())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="fills memory by a variable of glibc")
def test_the_same_frames_give_the_same_file_whatever_memory_held_before() -> None:
    """Without `mbtree=0` the files differ: at 160 pixels on one CPU, at other sizes on others."""
    said = {
        subprocess.run(
            [sys.executable, "-c", WRITES],
            env={**os.environ, "MALLOC_PERTURB_": byte},  # what memory is filled with
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for byte in ("0", "1")
    }

    assert len(said) == 1


@pytest.mark.parametrize("channels", [1, 2])
def test_sound_is_heard_as_long_and_as_high_as_it_was(tmp_path: Path, channels: int) -> None:
    path = tmp_path / "clip.mp4"

    write_mp4(frames(24), 24, tone(channels, seconds=1), path)

    with av.open(str(path)) as container:
        [stream] = container.streams.audio
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
        assert (stream.rate, stream.channels) == (RATE, channels)
    assert len(shown(path)) == 24
    assert heard.shape[0] == channels
    assert heard.shape[1] == pytest.approx(RATE, abs=2048)  # AAC has blocks of 1024
    spectrum = np.abs(np.fft.rfft(heard[0][:RATE]))
    assert np.argmax(spectrum) * RATE / len(heard[0][:RATE]) == pytest.approx(440, abs=3)


def test_a_file_can_be_played_while_it_is_downloaded(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"

    write_mp4(frames(5), 12, tone(1, 0.4), path, metadata={})

    names = [name for name, _ in boxes(path.read_bytes())]
    assert names.index(b"moov") < names.index(b"mdat")


def test_a_video_says_that_a_model_made_it_unless_it_is_to_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"

    write_mp4(frames(2), 12, None, path, metadata={})
    name, told = boxes(path.read_bytes())[-1]
    write_mp4(frames(2), 12, None, path)

    assert name == b"uuid"
    assert told[:16].hex() == "be7acfcb97a942e89c71999491e3afac"
    assert b"trainedAlgorithmicMedia" in told
    assert b"trainedAlgorithmicMedia" not in path.read_bytes()


def test_pictures_of_pillow_become_the_bytes_of_a_video() -> None:
    pictures = [Image.fromarray(picture) for picture in frames(3)]

    mp4 = encode_video(pictures, 12, {"seed": 7})

    assert all(map(near, shown(mp4), COLOURS[:3]))
    assert boxes(mp4)[-1][0] == b"uuid"


def test_a_thumbnail_is_the_first_frame_made_small(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_mp4(frames(2, 1024, 256), 12, None, path)

    image = Image.open(io.BytesIO(thumbnail(path)))

    assert (image.format, image.size) == ("WEBP", (512, 128))
    assert near(image, "red")


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (5, 3, 2), (100, 4, 4)])
def test_a_spritesheet_shows_frames_in_order(
    tmp_path: Path, count: int, columns: int, rows: int
) -> None:
    path = tmp_path / "clip.mp4"
    write_mp4(frames(count), 12, None, path)

    image = Image.open(io.BytesIO(spritesheet(path)))

    assert (image.format, image.size) == ("JPEG", (48 * columns, 32 * rows))
    assert near(image.crop((0, 0, 48, 32)), COLOURS[0])
    last = min(count, 16) - 1
    left, top = last % columns * 48, last // columns * 32
    assert near(image.crop((left, top, left + 48, top + 32)), COLOURS[(count - 1) % 5])


# Sound as files: samples and rates are read back, by the standard library or PyAV


TONE = np.sin(np.arange(RATE // 2) / RATE * 2 * np.pi * 440).astype(np.float32) * 0.5
STEREO = Sound(np.stack([TONE, -TONE]), RATE)


def decoded(data: bytes) -> tuple[NDArray[Any], int, dict[str, str]]:
    with av.open(io.BytesIO(data), "r") as container:
        frames = list(container.decode(audio=0))
        resampler = av.AudioResampler("fltp", frames[0].layout, frames[0].sample_rate)
        parts = [part.to_ndarray() for frame in frames for part in resampler.resample(frame)]
        return np.concatenate(parts, axis=1), frames[0].sample_rate, dict(container.metadata)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_a_wav_has_each_sample_as_sixteen_bits(channels: int) -> None:
    sound = Sound(np.stack([TONE * (i + 1) / channels for i in range(channels)]), RATE)

    with wave.open(io.BytesIO(encode_sound(sound, "wav"))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (
            channels,
            RATE,
            2,
        )
        heard = np.frombuffer(file.readframes(-1), "<i2").reshape(-1, channels).T

    np.testing.assert_allclose(heard / 32767, sound.samples, atol=1e-4)
    assert sound.duration_s == 0.5


def test_samples_beyond_the_range_are_cut_off_and_no_number_is_silence() -> None:
    sound = Sound(np.array([[3, -3, np.nan]], np.float32), RATE)

    with wave.open(io.BytesIO(encode_sound(sound, "wav"))) as file:
        assert np.frombuffer(file.readframes(-1), "<i2").tolist() == [32767, -32767, 0]


def test_a_flac_loses_nothing() -> None:
    heard, rate, _ = decoded(encode_sound(STEREO, "flac"))

    assert (rate, heard.shape) == (RATE, STEREO.samples.shape)
    np.testing.assert_allclose(heard, STEREO.samples, atol=1e-4)


@pytest.mark.parametrize(
    ("rate", "written"), [(16_000, 16_000), (17_000, 22_050), (96_000, 48_000)]
)
def test_an_mp3_sounds_alike_at_the_nearest_rate_that_it_knows(rate: int, written: int) -> None:
    heard, own_rate, _ = decoded(encode_sound(Sound(STEREO.samples, rate), "mp3"))

    assert own_rate == written
    assert heard.shape[1] == pytest.approx(TONE.size * written / rate, rel=0.5)
    assert np.abs(heard).max() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("format", ["wav", "flac", "mp3"])
def test_a_file_says_what_made_it_where_it_may(format: Any) -> None:
    told = {"model": "m", "prompt": "a bell", "seed": 3}

    said, statement, nothing = (encode_sound(STEREO, format, one) for one in (told, {}, None))

    for data, is_told in ((said, True), (statement, True), (nothing, False)):
        assert decoded(data)[0].shape[0] == 2
        notes = " ".join(decoded(data)[2].values())
        assert ("seed" in notes) == (data is said)
        assert ("trainedAlgorithmicMedia" in notes) == (is_told and data is not said)


def test_more_channels_than_a_format_takes_are_refused() -> None:
    sound = Sound(np.zeros((3, 100), np.float32), RATE)

    with pytest.raises(InvalidValue, match="3 channels: wav takes any number"):
        encode_sound(sound, "mp3")
