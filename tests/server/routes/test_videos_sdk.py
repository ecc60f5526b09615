"""Videos through OpenAI's own SDK, unmodified, against a real server."""

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
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
from support.server_process import Server, eventually, serving
from support.tiny import ARGUMENTS
from training.shapes.video.draw import FRAMES, SIZE_PX, parse
from training.shapes.video.judge import why_not

pytestmark = [
    pytest.mark.timeout(150),  # starting a server may take long
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # OpenAI's own service shuts down
]
PROMPT = "a red circle moving right on a blue background"
ENDLESS = 1000  # steps
ENDED = ("completed", "failed")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--job-ttl", "3600", "--max-running", "4", model="shapes-video") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    url = server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def made(client: openai.OpenAI) -> Any:
    """A video that is done."""
    video = client.videos.create_and_poll(prompt=PROMPT, extra_body={"seed": 3})
    assert video.status == "completed", video.error
    return video


def frames_of(mp4: bytes) -> list[Image.Image]:
    with av.open(io.BytesIO(mp4), "r") as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return [Image.fromarray(frame) for frame in decoded]


def begin(client: openai.OpenAI, **others: Any) -> Any:
    """A video that takes too long to wait for."""
    return client.videos.create(prompt=PROMPT, extra_body={"num_inference_steps": ENDLESS} | others)


def test_create_and_poll_gives_a_video_of_what_was_asked_for(
    client: openai.OpenAI, made: Any
) -> None:
    assert (made.object, made.model, made.prompt) == ("video", "shapes-video", PROMPT)
    assert (made.progress, made.size, made.seconds) == (100, f"{SIZE_PX}x{SIZE_PX}", "0.5625")
    assert (made.num_frames, made.fps, made.seed) == (FRAMES, 16, 3)
    assert made.created_at <= made.completed_at <= time.time() + 1
    assert made.expires_at - made.completed_at in (3599, 3600, 3601)
    assert (made.error, made.queue_position, made.eta_s) == (None, None, None)

    content = client.videos.download_content(made.id)

    assert content.response.headers["content-type"] == "video/mp4"
    frames = frames_of(content.read())
    assert len(frames) == FRAMES
    assert why_not(frames, parse(PROMPT)) == ""


def test_progress_is_real_and_never_falls(client: openai.OpenAI) -> None:
    video = client.videos.create(prompt=PROMPT, extra_body={"num_inference_steps": 60})
    assert (video.status, video.progress) == ("queued", 0)
    seen = []
    while (now := client.videos.retrieve(video.id)).status not in ENDED:
        seen.append(now.progress)
        time.sleep(0.01)  # the processor is the worker's

    assert now.status == "completed"
    assert seen == sorted(seen)
    assert len(set(seen)) > 10
    assert max(seen) <= 99


def test_a_poll_says_when_to_come_again(server: Server, client: openai.OpenAI) -> None:
    video = begin(client)
    url = f"/v1/videos/{video.id}"
    eventually(lambda: server.get(url).json()["eta_s"] is not None, 20, "the end is in sight")

    answer = server.get(url)

    assert 500 <= int(answer.headers["openai-poll-after-ms"]) <= 5000
    assert answer.json()["eta_s"] > 0
    client.videos.delete(video.id)


def test_a_video_that_is_being_made_is_deleted_and_ends(
    server: Server, client: openai.OpenAI
) -> None:
    video = begin(client)
    eventually(lambda: server.stats()["running"] == 1, 10, "it runs")
    with pytest.raises(openai.NotFoundError) as caught:
        client.videos.download_content(video.id)
    assert caught.value.code == "video_not_ready"

    deleted = client.videos.delete(video.id)

    assert (deleted.id, deleted.deleted, deleted.object) == (video.id, True, "video.deleted")
    eventually(lambda: server.stats()["running"] == 0, 3, "it is given up")
    for ask in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
        with pytest.raises(openai.NotFoundError, match="there is no video"):
            ask(video.id)


def test_a_cancelled_video_has_failed_for_the_sdk_and_is_cancelled_as_a_job(
    server: Server, client: openai.OpenAI
) -> None:
    video = begin(client)
    with server.client() as http:
        cancelled = http.post(f"/v1/jobs/{video.id}/cancel").json()

    assert (cancelled["status"], cancelled["error"]["code"]) == ("cancelled", "cancelled")
    failed = client.videos.retrieve(video.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "cancelled"
    eventually(lambda: server.stats()["running"] == 0, 3, "it is given up")


def test_every_video_is_listed_once(client: openai.OpenAI, made: Any) -> None:
    more = [begin(client) for _ in range(5)]  # more than run at once
    places = [client.videos.retrieve(video.id).queue_position for video in more]  # type: ignore[attr-defined]

    page = client.videos.list(limit=2)
    listed = [video.id for video in page]
    oldest_first = [video.id for video in client.videos.list(limit=3, order="asc")]

    assert page.has_more
    assert len(page.data) == 2
    assert listed[:5] == [video.id for video in reversed(more)]
    assert oldest_first == listed[::-1]
    assert made.id in listed
    assert places[-1] is not None
    for video in more:
        client.videos.delete(video.id)


def test_json_and_a_form_and_the_same_seed_give_the_same_video(
    server: Server, client: openai.OpenAI, made: Any
) -> None:
    eventually(lambda: server.stats()["running"] == 0, 20, "it is alone, as the first one was")
    with server.client() as http:
        answer = http.post("/v1/videos", json={"prompt": PROMPT, "seed": 3})
    again = client.videos.poll(answer.json()["id"])

    whole = [client.videos.download_content(one.id).read() for one in (made, again)]
    assert frames_of(whole[0]) == frames_of(whole[1])


# From a worker's clip to the files of a job


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
