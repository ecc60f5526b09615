"""Load clients of SGLang and vLLM-Omni: what they send is understood, or refused by name.

`recorded/peer_clients.json` was recorded from the clients themselves, by `proof/record_clients.py`
at 4ba7b035.
"""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol
from support.app import Grey, ask, open_app, refusal
from support.endpoints import EDITS, ENDPOINT, VIDEOS
from support.forms import BOTH, worker_of
from support.pictures import png
from support.video_app import Filming

RECORDS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "recorded" / "peer_clients.json").read_text()
)
URL = "data:image/png;base64," + base64.b64encode(png(48, 48)).decode()
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize("record", RECORDS, ids=lambda one: f"{one['client']} {one['path']}")
async def test_what_a_peers_client_sent_is_answered_as_it_was(record: dict[str, Any]) -> None:
    worker = Filming() if record["makes"] == "2v" else worker_of(BOTH)

    async with open_app(worker) as opened:
        answer = await opened.http.request(
            record["method"], record["path"], content=base64.b64decode(record["body"]),
            headers=record["headers"],
        )  # fmt: skip
        assert answer.status_code == record["status"] == 200, answer.text
        if record["path"] == VIDEOS:
            assert (await opened.ended(answer.json()["id"]))["status"] == "completed"

    if record["method"] == "POST":
        job = worker.jobs[0]
        assert job.arguments["prompt"] in ("a cat", "a dog", "a")
        has_picture = b"image/png" in base64.b64decode(record["body"]).replace(b"%2F", b"/")
        has_file = b"filename=" in base64.b64decode(record["body"])
        assert ("image" in job.arguments) == (has_picture or has_file)


def test_the_served_model_is_what_sglangs_client_then_asks_for() -> None:
    for path in ("/v1/model_info", "/model_info"):
        told = ask(b"", path, method="GET", worker=worker_of(BOTH)).json()
        assert (told["model_path"], told["is_image_gen"]) == ("grey", True)
        assert told["has_image_understanding"]
    told = ask(b"", "/server_info", method="GET").json()
    assert (told["model_path"], told["served_model_name"]) == ("grey", "grey")
    assert ask(b"", "/health_generate", method="GET").json() == {"status": "ready"}


def test_the_models_path_is_accepted_beside_its_served_name() -> None:
    for name, status in (("grey", 200), ("my-name", 200), ("other", 404)):
        body = json.dumps({"prompt": "a", "model": name})
        answer = ask(body, worker=Grey(), served_model_name="my-name")
        assert answer.status_code == status


def draw(worker: Grey | None = None, **fields: Any) -> Any:
    return ask(json.dumps({"prompt": "a", **fields}), ENDPOINT, worker=worker or Grey())


@pytest.mark.parametrize("name", ["extra_body", "diffusers_kwargs", "extra_params"])
def test_fields_of_a_nested_object_count_as_if_they_stood_at_top_level(name: str) -> None:
    worker = Grey()

    answer = draw(worker, **{name: {"num_inference_steps": 3, "n": 2, "seed": 5}})

    assert answer.status_code == 200, answer.text
    assert [job.seed for job in worker.jobs] == [5, 6]
    assert worker.jobs[0].arguments["num_inference_steps"] == 3


def test_num_outputs_per_prompt_is_n() -> None:
    assert len(draw(num_outputs_per_prompt=3).json()["data"]) == 3


@pytest.mark.parametrize(("seed", "n", "drawn"), [([9], 1, [9]), ([9], 2, [9, 10]),
                                                  ([9, 4, 4], 3, [9, 4, 4])])  # fmt: skip
def test_a_list_of_seeds_has_one_for_each_picture(
    seed: list[int], n: int, drawn: list[int]
) -> None:
    answer = draw(seed=seed, n=n)

    assert [one["seed"] for one in answer.json()["data"]] == drawn


NEUTRAL: list[dict[str, Any]] = [
    {"bot_task": "think"},
    {"generator_device": "cpu"},
    {"generator_device": "cuda"},
    {"enable_teacache": False, "enable_cache_dit": None, "enable_upscaling": 0},
    {"save_output": True},
    {"diffusers_kwargs": None, "extra_body": {}},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_what_changes_no_picture_is_left_out(fields: dict[str, Any]) -> None:
    worker = Grey()

    assert draw(worker, **fields).status_code == 200
    assert worker.jobs[0].arguments.keys() == {"prompt"}


CHANGES: list[tuple[dict[str, Any], str, str]] = [
    ({"enable_teacache": True}, "unsupported_parameter", "enable_teacache"),
    ({"enable_upscaling": "true"}, "unsupported_parameter", "enable_upscaling"),
    ({"generator_device": "cuda", "seed": 1}, "unsupported_parameter", "generator_device"),
    ({"system_prompt": "be bold"}, "unknown_parameter", "system_prompt"),
    ({"diffusers_kwargs": {"tempo": 1}}, "unknown_parameter", "tempo"),
    ({"diffusers_kwargs": [1]}, "invalid_value", "diffusers_kwargs"),
    ({"extra_body": {"extra_body": {}}}, "invalid_value", "extra_body"),
    ({"extra_body": {"prompt": "b"}}, "invalid_value", "prompt"),
    ({"n": 2, "num_outputs_per_prompt": 3}, "invalid_value", "n"),
    ({"num_outputs_per_prompt": "many"}, "invalid_value", "n"),
    ({"seed": [1, 2], "n": 3}, "invalid_value", "seed"),
    ({"seed": [1, None], "n": 2}, "invalid_value", "seed"),
    ({"seed": [1, "a"], "n": 2}, "invalid_value", "seed"),
    ({"seed": []}, "invalid_value", "seed"),
]


@pytest.mark.parametrize(("fields", "code", "param"), CHANGES, ids=str)
def test_what_would_change_the_picture_is_refused_by_name(
    fields: dict[str, Any], code: str, param: str
) -> None:
    worker = Grey()

    told = refusal(draw(worker, **fields))

    assert (told["code"], told["param"], worker.jobs) == (code, param, [])


class Measured(Grey):
    async def statistics(self) -> dict[str, Any]:
        return {"memory": {"peak_bytes": 2_500_000}}


def test_metrics_are_there_where_they_are_asked_for() -> None:
    assert draw().json()["metrics"] is None

    metrics = draw(Measured(), return_stage_metrics=True).json()["metrics"]

    assert metrics["peak_memory_mb"] == 2.5
    assert metrics["stage_durations"].keys() >= {"queue", "denoise", "stage_0_gen_ms"}


# Forms without files


WRONG_FORMS = [
    (b"", "invalid_json"),
    (b"prompt", "invalid_json"),
    (b"&".join([b"a=1"] * 200), "invalid_value"),
    (b"prompt=%ff&url=" + URL.encode(), "invalid_value"),
    (b"prompt=a&prompt=b&url=" + URL.encode(), "invalid_value"),
    (b"prompt=" + b"%41" * (1 << 20), "body_too_large"),
    (b"prompt=" + b"a" * (2 << 20), "body_too_large"),
    (b"prompt=a&url=http://127.0.0.1:9/a.png", "unsupported_parameter"),
    (b"prompt=a&url=%7B%22image_url%22", "invalid_json"),
]


@pytest.mark.parametrize(("body", "code"), WRONG_FORMS, ids=lambda value: str(value)[:30])
def test_an_urlencoded_form_that_is_wrong_is_refused(body: bytes, code: str) -> None:
    worker = worker_of(BOTH)

    told = refusal(ask(body, EDITS, worker=worker, headers=FORM))

    assert (told["code"], worker.jobs) == (code, [])


# Videos


class Timed(Filming):
    """Its requests take known seconds, and its device has held so many bytes."""

    async def submit(self, request: CheckedRequest, *given: Any, **options: Any) -> protocol.Done:
        done = await super().submit(request, *given, **options)
        done.timings = Timings(
            queue_s=1.0, encode_s=0.5, denoise_s=2.0, decode_s=0.25, total_s=3.75
        )
        return done

    async def statistics(self) -> dict[str, Any]:
        return {"memory": {"peak_bytes": 2_500_000}}


async def test_a_video_that_is_done_tells_where_its_time_went_and_what_memory_it_needed() -> None:
    spent = {"queue": 1.0, "encode": 0.5, "denoise": 2.0, "decode": 0.25, "stage_0_gen_ms": 2750.0}

    async with open_app(Timed()) as opened:
        video = (await opened.http.post(VIDEOS, json={"prompt": "a"})).json()
        assert video["inference_time_s"] is None
        assert video["stage_durations"] is None
        assert video["peak_memory_mb"] is None
        await opened.ended(video["id"])
        video = (await opened.http.get(f"{VIDEOS}/{video['id']}")).json()
        assert video["inference_time_s"] >= 0
        assert video["stage_durations"] == spent
        assert video["peak_memory_mb"] == 2.5
        [listed] = (await opened.http.get(VIDEOS)).json()["data"]
        assert listed["stage_durations"] == spent
        answer = await opened.http.post(f"{VIDEOS}/sync", json={"prompt": "a"})
        assert json.loads(answer.headers["x-stage-durations"]) == spent
        assert answer.headers["x-peak-memory-mb"] == "2.500"


async def test_a_video_at_once_is_the_file() -> None:
    async with open_app(Filming()) as opened:
        answer = await opened.http.post(f"{VIDEOS}/sync", json={"prompt": "a", "fps": 8})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "video/mp4"
        assert answer.headers["x-model"] == "grey"
        assert float(answer.headers["x-inference-time-s"]) >= 0
        content = f"{VIDEOS}/{answer.headers['x-video-id']}/content"
        assert (await opened.http.get(content)).content == answer.content


async def test_a_video_at_once_that_fails_says_why() -> None:
    worker = Filming()
    worker.is_broken = True

    async with open_app(worker) as opened:
        answer = await opened.http.post(f"{VIDEOS}/sync", json={"prompt": "a"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "it broke"


async def test_a_request_makes_one_video() -> None:
    body = json.dumps({"prompt": "a", "num_outputs_per_prompt": 2})

    async with open_app(Filming()) as opened:
        answer = await opened.http.post(
            VIDEOS, content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_parameter"
