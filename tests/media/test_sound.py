"""Sound as files: samples and rates are read back, by the standard library or PyAV."""

import io
import wave
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from carpool.artifacts import Sound
from carpool.errors import InvalidValue
from carpool.media import encode_sound

RATE = 16_000
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
