"""From a worker's clip to the files of a job."""

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from carpool.artifacts import Sound
from carpool.errors import PipelineFailed
from carpool.jobs.database import Record
from carpool.jobs.store import JobStore
from carpool.jobs.work import work_of
from carpool.server.openai_fields import length_of
from carpool.server.routes.videos import write_video
from carpool.types import Timings
from carpool.worker.protocol import Done, RawVideo, TokenUsage
from support.app import CARD
from support.engine_driver import driving, served
from support.matrix.wan import without_ftfy
from support.tiny import ARGUMENTS

RATE = 24_000


@pytest.fixture
def record() -> Any:
    store = JobStore()
    yield store.submit("video", {}, work_of("mine", [], fps=8.0, told={"seed": 1}))
    store.close()


def pixels() -> np.ndarray[Any, Any]:
    """12 frames of 64x32 that grow brighter."""
    return np.stack([np.full((32, 64, 3), 20 * i, np.uint8) for i in range(12)])


def done(clip: RawVideo | None) -> list[Done]:
    return [Done("a", 1, [], Timings(), TokenUsage(0, 0), clip)]


def test_a_clip_becomes_a_video_with_its_small_pictures(tmp_path: Path, record: Record) -> None:
    clip = RawVideo(64, 32, 12, pixels().tobytes())
    folder = tmp_path / "job"
    folder.mkdir()

    write_video(record, done(clip), folder)

    names = {path.name for path in folder.iterdir()}
    assert names == {"video.mp4", "thumbnail.webp", "spritesheet.jpg"}
    with av.open(str(folder / "video.mp4")) as container:
        assert not container.streams.audio
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 12
    assert np.abs(np.stack(frames).astype(int) - pixels()).max() < 6
    with Image.open(folder / "thumbnail.webp") as image:
        assert image.size == (64, 32)


def test_what_is_heard_in_a_clip_is_in_the_video(tmp_path: Path, record: Record) -> None:
    tone = np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE).astype(np.float32)
    sound = Sound(np.stack([tone, tone]), RATE)
    clip = RawVideo(64, 32, 12, pixels().tobytes(), sound=sound)

    write_video(record, done(clip), tmp_path)

    with av.open(str(tmp_path / "video.mp4")) as container:
        [stream] = container.streams.audio
        assert (stream.rate, stream.channels) == (RATE, 2)


def test_a_pipeline_that_gave_no_video_has_failed(tmp_path: Path, record: Record) -> None:
    with pytest.raises(PipelineFailed, match="gave no video"):
        write_video(record, done(None), tmp_path)


@pytest.mark.parametrize("family", ["wan21_t2v", "hunyuan_t2v", "ltx2", "helios_base"])
def test_a_video_is_as_long_as_its_job_says(family: str) -> None:
    without_ftfy(served(family))

    with driving(family) as drive:
        for asked in (2, 11):
            arguments = {**ARGUMENTS[family], "num_frames": asked, "num_inference_steps": 1}
            length = length_of(drive.engine.loaded.card, arguments)
            video = drive.submit(**{**arguments, "num_frames": length})
            drive.finish()
            assert len(video.outcome.fields["frames"][0]) == length


def test_a_model_that_counts_single_frames_makes_as_many_as_asked() -> None:
    assert [length_of(CARD, {"num_frames": n}) for n in (1, 2, 8)] == [1, 2, 8]
    assert length_of(CARD, {}) == 0
