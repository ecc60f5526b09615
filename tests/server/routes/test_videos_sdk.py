"""Videos through OpenAI's own SDK, unmodified, and pictures as jobs, against a real server."""

import base64
import io
import time
from collections.abc import Iterator
from typing import Any

import av
import httpx2
import openai
import pytest
from PIL import Image

from support.pictures import ALIKE, gap, picture
from support.server_process import Server, eventually, serving
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


def test_the_small_pictures_of_a_video_are_served(client: openai.OpenAI, made: Any) -> None:
    for variant, type_ in (("thumbnail", "WEBP"), ("spritesheet", "JPEG")):
        content = client.videos.download_content(made.id, variant=variant)  # type: ignore[arg-type]
        with Image.open(io.BytesIO(content.read())) as image:
            assert image.format == type_
            assert content.response.headers["content-type"] == Image.MIME[type_]


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


def test_a_remix_has_another_prompt_and_the_same_rest(client: openai.OpenAI, made: Any) -> None:
    prompt = "a green square moving up on a black background"

    video = client.videos.remix(made.id, prompt=prompt)
    while video.status not in ENDED:
        video = client.videos.retrieve(video.id)

    assert (video.status, video.remixed_from_video_id) == ("completed", made.id)
    assert (video.prompt, video.seed) == (prompt, 3)  # type: ignore[attr-defined]
    frames = frames_of(client.videos.download_content(video.id).read())
    assert why_not(frames, parse(prompt)) == ""


def test_json_and_a_form_and_the_same_seed_give_the_same_video(
    server: Server, client: openai.OpenAI, made: Any
) -> None:
    eventually(lambda: server.stats()["running"] == 0, 20, "it is alone, as the first one was")
    with server.client() as http:
        answer = http.post("/v1/videos", json={"prompt": PROMPT, "seed": 3})
    again = client.videos.poll(answer.json()["id"])

    whole = [client.videos.download_content(one.id).read() for one in (made, again)]
    assert frames_of(whole[0]) == frames_of(whole[1])


def test_seconds_times_fps_are_frames(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "seconds": "2", "size": "48x48"}
    more = {"fps": 8, "num_inference_steps": 2}
    video: Any = client.videos.create(**asked, extra_body=more)

    assert (video.seconds, video.fps, video.num_frames) == ("2", 8, 17)
    assert client.videos.poll(video.id).status == "completed"
    mp4 = io.BytesIO(client.videos.download_content(video.id).read())
    with av.open(mp4, "r") as container:
        [stream] = container.streams.video
        assert (stream.frames, float(stream.average_rate or 0)) == (17, 8)


# Pictures as jobs


@pytest.fixture(scope="module")
def painter() -> Iterator[httpx2.Client]:
    with serving(model="shapes") as server, server.client() as http:
        yield http


def ended(http: httpx2.Client, job_id: str) -> dict[str, Any]:
    while True:
        job: dict[str, Any] = http.get(f"/v1/jobs/{job_id}").json()
        if job["status"] not in ("queued", "in_progress"):
            return job
        time.sleep(0.02)


def test_pictures_in_the_background_are_those_of_the_foreground(painter: httpx2.Client) -> None:
    body = {"prompt": "a red circle on a blue background", "n": 2, "seed": 5}
    answer = painter.post("/v1/images/generations", json=body | {"background_job": True})
    assert answer.status_code == 202
    job = answer.json()
    assert (job["kind"], job["model"], job["seeds"]) == ("image", "shapes", [5, 6])
    assert job["id"].startswith("image_")

    job = ended(painter, job["id"])

    assert (job["status"], job["progress"], job["error"]) == ("completed", 100, None)
    front = painter.post("/v1/images/generations", json=body).json()["data"]
    assert [file["name"] for file in job["files"]] == ["0.png", "1.png"]
    for file, image in zip(job["files"], front, strict=True):
        served = painter.get(file["url"])
        assert served.headers["content-type"] == "image/png"
        assert len(served.content) == file["bytes"]
        drawn = picture(base64.b64decode(image["b64_json"]))
        assert gap(picture(served.content), drawn) <= ALIKE
    [listed] = painter.get("/v1/jobs").json()["data"]
    for file in (*listed["files"], *job["files"]):
        assert file.pop("signed_url").split("?")[0].endswith(f"{job['id']}/{file['name']}")
    assert listed == job
    assert painter.get(f"/v1/jobs/{job['id']}/files/2.png").status_code == 404
    assert painter.get(f"/v1/videos/{job['id']}").status_code == 404
    assert painter.delete(f"/v1/jobs/{job['id']}").json()["deleted"]
    assert painter.get(f"/v1/jobs/{job['id']}").status_code == 404
