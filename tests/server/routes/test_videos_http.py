"""`/v1/videos` before a worker that is none: what is said of a video is what its file has."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from carpool.request.card import Parameter
from carpool.worker import protocol
from support.app import Grey, open_app, refusal
from support.endpoints import VIDEOS
from support.forms import BOTH
from support.video_app import MOVING, TEXT, Filming, post

WAN = replace(MOVING, frame_step=4)
JOB = {"prompt": "a", "background_job": True}


def shown(body: dict[str, Any], worker: Filming) -> dict[str, Any]:
    """A video's job as its client sees it."""

    async def talk() -> dict[str, Any]:
        async with open_app(worker) as opened:
            answer = await post(opened, **body)
            assert answer.status_code == 200, answer.text
            await opened.ended(answer.json()["id"])
            return dict(answer.json())

    return asyncio.run(talk())


def refused(worker: Grey, path: str = VIDEOS, method: str = "POST", **body: Any) -> dict[str, Any]:
    async def talk() -> dict[str, Any]:
        async with open_app(worker) as opened:
            sent = {"prompt": "a", **body} if method == "POST" else None
            answer = await opened.http.request(method, path, json=sent)
            return refusal(answer) | {"status": answer.status_code}

    return asyncio.run(talk())


@pytest.mark.parametrize(
    ("body", "length"),
    [
        ({"seconds": "1", "fps": 10}, 9), ({"num_frames": 1}, 1), ({"num_frames": 2}, 1),
        ({"num_frames": 8}, 9), ({"num_frames": 9}, 9), ({}, 5),
    ],
)  # fmt: skip
def test_a_length_is_what_the_model_makes_of_it(body: dict[str, Any], length: int) -> None:
    worker = Filming(WAN)

    video = shown({**body, "seed": 1}, worker)

    assert video["num_frames"] == length
    [job] = worker.jobs
    assert job.arguments.get("num_frames", 5) == length


def test_a_length_that_grows_beyond_the_limit_says_so() -> None:
    told = refused(Filming(WAN), num_frames=512)

    assert (told["code"], told["param"]) == ("invalid_value", "num_frames")
    assert told["message"].startswith("num_frames=512 makes 513 frames: must be at most 512")


def wrong(param: str, says: str, *values: Any) -> list[Any]:
    return [({param: value}, param, says) for value in values]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    *wrong("fps", ": must be from 1 to 240", 1e-9, 0, 0.5, 241, "0", "1_0", " 10", "\u0661\u0660",
           True, "nan"),
    *wrong("seconds", ": must be above 0, at most 512", "1_0", " 1", "\u0661", "1e999", True, "0",
           "long"),
    *wrong("seconds", "is 1585 frames at 16 a second: must be at most 512 (--max-frames)"
           ", which is 31.9 seconds", "99"),
    *wrong("num_frames", "at most 512", 2**40),
    *wrong("size", "nearest size is 48x48", "47x48"),
    *wrong("seed", "from 0 to", -1, "one"),
    *wrong("num_steps", "did you mean", 3),
    *wrong("request_id", "no parameter", "x"),
    *wrong("prompt", "at most 32000", "x" * 32_001),
    *wrong("user", "at most 256 characters", "x" * 257),
    *wrong("safety_identifier", "at most 256 characters", "x" * 257),
    ({"seconds": "1", "num_frames": 9}, "seconds", "not both"),
]  # fmt: skip


@pytest.mark.parametrize("is_form", [False, True], ids=["JSON", "form"])
@pytest.mark.parametrize(("body", "param", "says"), WRONG, ids=lambda one: f"{one!s:.20}")
async def test_a_wrong_request_is_refused_by_name_and_rule(
    body: dict[str, Any], param: str, says: str, is_form: bool
) -> None:
    texts = {name: str(value).lower() for name, value in body.items()}
    async with open_app(Filming(WAN), runs=False) as opened:
        told = refusal(await (post(opened, texts) if is_form else post(opened, **body)))

    assert told["param"] == param
    assert says in told["message"]


@pytest.mark.parametrize("name", ["output_format", "output_type"])
def test_a_video_is_an_mp4_and_nothing_else(name: str) -> None:
    own = (*TEXT.parameters, Parameter("output_type", "str", default="np"))
    worker = Filming(replace(MOVING, tasks=(replace(TEXT, parameters=own),)))

    told = refused(worker, **{name: "mp4"})

    assert told["message"] == f"{name} is not supported: a video is an MP4 file, leave it out"
    assert (told["code"], told["param"]) == ("unsupported_parameter", name)


def test_a_video_is_made_of_one_prompt() -> None:
    told = refused(Filming(), prompt=["a", "b"])

    assert (told["code"], told["param"]) == ("invalid_value", "prompt")
    assert told["message"] == (
        "prompt is a list of 2: send one request for each prompt, as a video is made of one"
    )


def test_a_model_of_pictures_points_to_where_it_draws() -> None:
    worker = Grey()
    worker.ready = protocol.WorkerReady(BOTH, {}, 0.0)

    told = refused(worker)

    assert (told["code"], told["param"]) == ("unsupported_parameter", "model")
    assert told["message"].endswith("with videos: POST /v1/images/generations makes them")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "nobody"), ("DELETE", "nobody"), ("GET", "nobody/content"),
        ("POST", "nobody/remix"), ("GET", "?after=nobody"),
    ],
)  # fmt: skip
def test_an_unknown_video_is_not_found_as_a_video(method: str, path: str) -> None:
    told = refused(Filming(), f"{VIDEOS}/{path}".replace("/?", "?"), method)

    assert (told["status"], told["code"]) == (404, "video_not_found")
    assert told["message"].startswith("there is no video 'nobody'")


async def test_a_job_of_several_prompts_has_the_seeds_and_files_of_all() -> None:
    async with open_app(Grey(), runs=True) as opened:
        said = {**JOB, "prompt": ["a cat", "a dog"], "n": 2, "seed": 5}
        job = (await opened.http.post("/v1/images/generations", json=said)).json()
        assert (job["settings"]["prompt"], job["settings"]["n"]) == (["a cat", "a dog"], 2)
        while job["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0)
            job = (await opened.http.get(f"/v1/jobs/{job['id']}")).json()

        assert (job["status"], job["seeds"]) == ("completed", [5, 6, 7, 8])
        assert [one["name"] for one in job["files"]] == [f"{i}.png" for i in range(4)]


async def test_a_job_of_pictures_is_no_video_and_is_found_among_the_jobs() -> None:
    async with open_app(Grey(), runs=False) as opened:
        job = (await opened.http.post("/v1/images/generations", json=JOB)).json()["id"]
        answer = await opened.http.get(f"{VIDEOS}/{job}")
        told = refusal(answer)
        assert (answer.status_code, told["code"]) == (404, "video_not_found")
        assert told["message"].endswith(f"makes no video: ask /v1/jobs/{job}")
        told = refusal(await opened.http.get(f"/v1/jobs/{job}/files/0.png"))
        assert told["code"] == "file_not_ready"
        told = refusal(await opened.http.get("/v1/jobs/nobody"))
        assert told["code"] == "job_not_found"


async def test_a_video_that_is_not_made_yet_is_not_ready() -> None:
    async with open_app(Filming(), runs=False) as opened:
        video = (await post(opened, seed=1)).json()["id"]
        answer = await opened.http.get(f"{VIDEOS}/{video}/content")
        told = refusal(answer)
        assert (answer.status_code, told["code"]) == (404, "video_not_ready")
        assert "it is queued" in told["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "edits"), ("POST", "extensions"), ("POST", "characters"), ("GET", "characters/x")],
)
def test_what_openai_has_beyond_that_is_told_apart_from_a_wrong_path(
    method: str, path: str
) -> None:
    told = refused(Filming(), f"{VIDEOS}/{path}", method)

    assert (told["status"], told["code"]) == (404, "unsupported_endpoint")
    assert told["message"].startswith(
        f"{VIDEOS}/{path} is not supported: POST /v1/videos/{{id}}/re"
    )


async def test_files_of_jobs_lie_behind_the_servers_root_path() -> None:
    async with open_app(Grey(), root_path="/draw/") as opened:
        job = (await opened.http.post("/v1/images/generations", json=JOB)).json()
        done = await opened.ended(job["id"])
        [file] = done["files"]
        assert file["url"] == f"/draw/v1/jobs/{job['id']}/files/0.png"
        [listed] = (await opened.http.get("/v1/jobs")).json()["data"]
        assert listed["files"] == done["files"]
        assert (await opened.http.get(file["url"])).status_code == 200


def test_a_job_in_the_background_is_sent_to_the_edits_too() -> None:
    worker = Grey()
    worker.ready = protocol.WorkerReady(BOTH, {}, 0.0)

    told = refused(worker, "/v1/images/generations", background_job=True, image="x")

    assert told["message"].endswith("POST /v1/images/edits")
