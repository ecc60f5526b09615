"""Pictures of a pipeline's own parameters over HTTP: alone, in lists, and in lists of lists."""

import base64
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.jobs.work import requests_of, work_of
from carpool.media.inputs import packed, unpacked
from carpool.request.card import Parameter, Task
from carpool.types import CheckedRequest
from support.app import CARD, Grey, ask, refusal
from support.endpoints import EDITS, ENDPOINT
from support.forms import CHANGE, OWN, worker_of
from support.pictures import picture, png

OTHERS = (Parameter("control_image", "other"), Parameter("ip_adapter_image", "other"))
CONTROL = Task("text-to-image", "GreyControl", (*OWN.parameters, *OTHERS))
BESIDE = Task("image-to-image", "GreyBeside", (*CHANGE.parameters, *OTHERS))
BOTH = replace(CARD, tasks=(CONTROL, BESIDE))
FILES = [png(seed=seed) for seed in range(4)]
URLS = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in FILES]
Nested = Any


def post(path: str, **fields: Any) -> tuple[Any, Grey]:
    worker = worker_of(BOTH)
    return ask(json.dumps({"prompt": "a", **fields}), path, worker=worker), worker


def pixels(value: Nested) -> Nested:
    return [pixels(one) for one in value] if isinstance(value, list) else value.tobytes()


A, B, C, D = (picture(one).tobytes() for one in FILES)


@pytest.mark.parametrize(
    ("sent", "drawn"),
    [
        (URLS[0], A), ({"image_url": URLS[1]}, B), ([URLS[0]], [A]),
        ([URLS[0], {"image_url": URLS[1]}], [A, B]),
        ([[URLS[0], URLS[1]], [URLS[2]], URLS[3]], [[A, B], [C], D]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["control_image", "ip_adapter_image"])
def test_pictures_are_nested_as_they_were_sent(name: str, sent: Nested, drawn: Nested) -> None:
    answer, worker = post(ENDPOINT, **{name: sent})

    assert answer.status_code == 200, answer.text
    [job] = worker.jobs
    assert pixels(job.arguments[name]) == drawn
    assert job.task == "text-to-image"


def test_they_may_stand_beside_the_picture_that_is_edited() -> None:
    answer, worker = post(EDITS, images=[URLS[0]], control_image=[URLS[1]], n=2)

    assert answer.status_code == 200, answer.text
    for job in worker.jobs:
        assert job.task == "image-to-image"
        assert pixels(job.arguments["image"]) == A
        assert pixels(job.arguments["control_image"]) == [B]


def test_the_pictures_themselves_may_be_lists_of_lists() -> None:
    answer, worker = post(EDITS, images=[[URLS[0], URLS[1]], [URLS[2]]])

    assert answer.status_code == 200, answer.text
    assert pixels(worker.jobs[0].arguments["image"]) == [[A, B], [C]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"control_image": [["https://example.org/a.png"]]}, "--allow-remote-media"),
        ({"control_image": [[7]]}, "control_image"),
        (
            {"control_image": ["data:image/png;base64,AAAA"] * 65},
            "have 65 pictures: must be at most 64",
        ),
        ({"control_image": "data:image/png;base64,AAAA"}, "control_image cannot be read"),
        (
            {"control_mask": URLS[0]},
            "has no parameter 'control_mask'; did you mean 'control_image'?",
        ),
    ],
)
def test_what_is_no_picture_is_refused(fields: dict[str, Any], message: str) -> None:
    answer, _ = post(ENDPOINT, **fields)

    assert message in refusal(answer)["message"]


@pytest.mark.parametrize(
    "nested",
    [
        lambda a, b: a, lambda a, b: [a], lambda a, b: [a, b], lambda a, b: [[a, b], [b]],
        lambda a, b: [[[a]], b],
    ],
)  # fmt: skip
def test_a_job_keeps_them_as_they_were(nested: Any) -> None:
    given = nested(picture(FILES[0]), picture(FILES[1]))
    request = CheckedRequest("one", 0, {"prompt": "a", "control_image": given})
    names, files = packed(request.arguments)
    work = json.loads(json.dumps(work_of("grey", [request], names)))
    record: Any = SimpleNamespace(work=work, created_up_s=0.0)

    [again] = requests_of(record, "grey", files.get, unpacked, 0.0)

    assert pixels(again.arguments["control_image"]) == pixels(given)


def test_the_models_page_names_them_as_pictures() -> None:
    told = ask("", "/v1/models", method="GET", worker=worker_of(BOTH)).json()["data"][0]

    kinds = {one["name"]: one["kind"] for one in told["parameters"]}
    assert kinds["control_image"] == kinds["ip_adapter_image"] == "picture"
    assert "latents" not in kinds
