"""Pictures over HTTP, before a worker that is none: links, qualities, and what models lack."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from carpool.config import ServeSettings
from carpool.errors import FileNotFound, StoreFailed
from carpool.request.card import Card, Parameter, Task
from carpool.server.access.signed_links import TTL_S, SignedFiles
from carpool.server.app import create_app
from carpool.types import CheckedRequest
from carpool.worker import protocol
from support.app import CARD, Grey, ask, client_of, fleet_of, idle_jobs, parts, refusal
from support.endpoints import ENDPOINT
from support.pictures import picture

PLAIN = Task("text-to-image", "PlainPipeline", (Parameter("prompt", "str"),))


def worker_of(steps: int | None = None, **card: Any) -> Grey:
    """A worker whose model takes so many steps by default."""
    own = CARD.tasks[0]
    others = tuple(one for one in own.parameters if one.name != "num_inference_steps")
    if steps is not None:
        others += (Parameter("num_inference_steps", "int", default=steps),)
    worker = Grey()
    known: Card = replace(CARD, **{"tasks": (replace(own, parameters=others),), **card})
    worker.ready = protocol.WorkerReady(known, {}, 0.0)
    return worker


def draw(worker: Grey | None = None, **body: Any) -> httpx2.Response:
    return ask(json.dumps({"prompt": "a", **body}), worker=worker or Grey())


# Quality


@pytest.mark.parametrize(
    ("quality", "steps"),
    [("low", 10), ("medium", None), ("standard", None), ("auto", None), (None, None),
     ("high", 30), ("hd", 30), ("xhigh", 40), ("max", 60)],
)  # fmt: skip
def test_a_quality_is_a_number_of_steps(quality: str | None, steps: int | None) -> None:
    worker = worker_of(20)

    answer = draw(worker, quality=quality)

    assert worker.jobs[0].arguments.get("num_inference_steps") == steps
    assert answer.json()["quality"] == (quality or "auto")


@pytest.mark.parametrize(
    ("body", "card", "expected"),
    [
        ({"num_inference_steps": 7}, {}, 7),  # said by the request itself
        ({"sigmas": [1.0, 0.5]}, {}, None),
        ({}, {"defaults": {"num_inference_steps": 4}}, 4),  # a distilled model
        ({}, {"defaults": {"num_inference_steps": 40}}, 60),
        ({}, {"max_steps": 25}, 25),
    ],
)
def test_a_quality_gives_way(
    body: dict[str, Any], card: dict[str, Any], expected: int | None
) -> None:
    worker = worker_of(20, **card)

    assert draw(worker, quality="high", **body).status_code == 200

    has_effect = expected == 60 or "max_steps" in card
    assert ("quality=high changes nothing" in " ".join(worker.jobs[0].warnings)) is not has_effect
    assert worker.jobs[0].arguments.get("num_inference_steps") == expected


def test_a_model_that_counts_no_steps_has_one_quality() -> None:
    worker = worker_of(None)

    assert draw(worker, quality="low").status_code == 200

    assert "num_inference_steps" not in worker.jobs[0].arguments


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"partial_images": 2}, "partial_images"),
        ({"stream": True, "return_stage_metrics": True}, "return_stage_metrics"),
        ({"background_job": True, "return_stage_metrics": True}, "return_stage_metrics"),
        ({"stream": True, "response_format": "url"}, "response_format"),
        ({"output_compression": 0}, "output_compression"),
    ],
)
def test_a_field_without_effect_on_the_answer_is_refused(body: dict[str, Any], param: str) -> None:
    error = refusal(draw(**body))

    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


# What is meant for somewhere else

PICTURE = Parameter("image", "other")
STRENGTH = Parameter("strength", "float", default=0.6)
OWN = tuple(one for one in CARD.parameters if one.name != "strength")
DRAWS = Task("text-to-image", "GreyPipeline", OWN)
CHANGES = Task("image-to-image", "GreyImg2Img", (*OWN, PICTURE, STRENGTH))
FILLS = Task("inpaint", "GreyInpaint", (*OWN, PICTURE, Parameter("mask_image", "other"), STRENGTH))


TO_EDITS = "send it with its picture to POST /v1/images/edits"
MEANT: list[tuple[tuple[Task, ...], dict[str, Any], str, str, str]] = [
    *(((DRAWS, CHANGES), {name: 0.5}, "unsupported_parameter", name, TO_EDITS)
      for name in ("image", "images", "mask", "mask_image", "strength")),
    ((DRAWS, CHANGES), {"control_image": "data:image/png;base64,"}, "unknown_parameter",
     "control_image", "it takes"),
    ((PLAIN,), {"image": "x"}, "unknown_parameter", "image",
     "PlainPipeline has no parameter 'image': it takes prompt"),
    ((PLAIN,), {"true_cfg_scale": 2.0}, "unknown_parameter", "true_cfg_scale", "it takes prompt"),
    ((PLAIN,), {"size": "64x64"}, "unsupported_parameter", "size",
     "size is not supported: PlainPipeline sets the size itself, leave it out"),
    ((replace(PLAIN, name="text-to-video"),), {"size": "1x1", "image": "x"},
     "unsupported_parameter", "model", "POST /v1/videos makes them"),
    ((replace(PLAIN, name="text-to-audio"),), {"size": "1x1", "image": "x"},
     "unsupported_parameter", "model", "POST /v1/audio/generations makes them"),
    ((replace(PLAIN, pipeline="LayeredPipeline"),), {}, "unsupported_parameter", "model",
     "makes layers, and this endpoint answers with pictures: carpool.load in Python"),
]  # fmt: skip


@pytest.mark.parametrize(("tasks", "body", "code", "param", "says"), MEANT)
def test_what_is_meant_for_another_task_or_model_is_told_where_to_go(
    tasks: tuple[Task, ...], body: dict[str, Any], code: str, param: str, says: str
) -> None:
    told = refusal(draw(worker_of(tasks=tasks), **body))

    assert (told["code"], told["param"]) == (code, param)
    assert says in told["message"]
    assert ("/v1/images/edits" in told["message"]) == (says == TO_EDITS)


def test_an_edit_that_says_nothing_is_no_edit() -> None:
    worker = worker_of(tasks=(DRAWS, CHANGES))
    assert draw(worker, image=None, strength=None).status_code == 200

    plain = worker_of(tasks=(PLAIN,))  # knows few of the names that others do
    assert draw(plain).status_code == 200
    assert plain.jobs[0].arguments == {"prompt": "a"}


# What is shown of values and of the model


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"n": None, "seed": True}, "seed=true: must be a whole number"),
        ({"n": "2"}, 'n="2": must be a whole number'),
        ({"quality": "best"}, "must be 'auto'"),
        ({"sigmas": [None, False]}, "sigmas=[null, false]: must be"),
        ({"timeout_s": 3.5e38}, "must be a number of seconds above 0, at most 3.4e38"),
        ({"size": "64X64"}, 'size "64X64" is not supported: write WIDTHxHEIGHT in pixels, such as '
                            "64x64, or auto"),
        ({"size": "4096x2048"}, "the nearest size of this shape is 2896x1440"),
        ({"prompt": ["a", "b"], "n": 6}, "2 prompts x n=6 are 12 pictures: must be at most 10 in "
                                         "one request, which is 5 of each"),
        ({"prompt": ["a", "b"], "negative_prompt": ["c"]}, "prompt has 2 entries and "
                                                           "negative_prompt 1: lists of prompts"),
        ({"output_typ": "pil"}, "GreyPipeline has no parameter 'output_typ'"),
    ],
)  # fmt: skip
def test_values_are_written_as_json_with_what_works(body: dict[str, Any], says: str) -> None:
    told = refusal(draw(**body))

    assert says in told["message"]
    assert "output_type" not in told["message"]


@pytest.mark.parametrize("name", ["user", "safety_identifier"])
def test_the_name_of_a_user_has_at_most_256_characters(name: str) -> None:
    said: dict[str, Any] = {name: "x" * 256}
    assert draw(**said).status_code == 200

    said[name] += "x"
    told = refusal(draw(**said))
    assert (told["param"], told["code"]) == (name, "invalid_value")
    assert "at most 256 characters" in told["message"]


def test_the_model_tells_its_tasks_and_the_defaults_that_count() -> None:
    worker = worker_of(20, tasks=(DRAWS, CHANGES, FILLS), defaults={"num_inference_steps": 12})

    [model] = ask("", "/v1/models", method="GET", worker=worker).json()["data"]

    assert model["tasks"] == ["text-to-image", "image-to-image", "inpaint"]
    known = {one["name"]: one for one in model["parameters"]}
    assert known["num_inference_steps"] == {
        "name": "num_inference_steps", "kind": "int", "required": False, "default": 12,
        "tasks": ["text-to-image", "image-to-image", "inpaint"],
    }  # fmt: skip
    assert known["guidance_scale"]["default"] == 3.5
    assert (known["strength"]["tasks"], known["strength"]["default"]) == (
        ["image-to-image", "inpaint"], 0.6,
    )  # fmt: skip
    assert (known["mask"]["kind"], known["mask"]["tasks"]) == ("picture", ["inpaint"])
    assert "latents" not in known


def test_a_model_of_videos_has_the_size_of_its_pipeline() -> None:
    sides = (Parameter("width", "int", default=832), Parameter("height", "int", default=480))
    film = Task("image-to-video", "GreyVideo", (Parameter("prompt", "str"), PICTURE, *sides))
    worker = worker_of(tasks=(film,), default_size_px=None)

    [model] = ask("", "/v1/models", method="GET", worker=worker).json()["data"]

    assert model["default_size"] == "832x480"
    assert {one["name"] for one in model["parameters"]} >= {"input_reference", "width"}


# Links


async def test_a_link_leads_to_the_picture_without_a_key() -> None:
    app = create_app(fleet_of(Grey()), ServeSettings(port=0, api_key=("secret",)), idle_jobs())

    async with client_of(app) as client:
        body = {"prompt": "a", "response_format": "url", "output_format": "webp"}
        bearer = {"authorization": "Bearer secret"}
        answer = await client.post(ENDPOINT, json=body, headers=bearer)
        [image] = answer.json()["data"]
        url = image["url"]
        wrong = [url[:-1] + "x", url.split("&")[0], url.replace("file-", "file-0")]
        wrong += [re.sub(r"expires=\d", "expires=9", url), url.split("?")[0]]
        right, *wrong = [await client.get(one) for one in (url, *wrong)]

    assert (image["b64_json"], right.status_code) == (None, 200)
    assert right.headers["content-type"] == "image/webp"
    assert right.headers["x-content-type-options"] == "nosniff"
    assert picture(right.content).size == (16, 16)
    for answer in wrong:
        assert (answer.status_code, refusal(answer)["code"]) == (404, "file_not_found")


def test_links_end_after_an_hour(tmp_path: Path) -> None:
    now_s = 1000.0
    files = SignedFiles(tmp_path, clock=lambda: now_s)
    link = files.keep(b"picture", "png")

    now_s += TTL_S - 1
    assert files.get(*parts(link)).read_bytes() == b"picture"
    now_s += 1
    with pytest.raises(FileNotFound, match="links end after an hour"):
        files.get(*parts(link))
    other = files.keep(b"another", "png")  # takes the old one's place
    assert files.get(*parts(other)).read_bytes() == b"another"
    assert len(files) == 1


def test_files_take_a_bounded_place_and_the_oldest_goes_first(tmp_path: Path) -> None:
    files = SignedFiles(tmp_path, clock=lambda: 0.0, most_bytes=10)
    links = [files.keep(bytes(4), "png") for _ in range(3)]

    with pytest.raises(FileNotFound):
        files.get(*parts(links[0]))
    for link in links[1:]:
        assert files.get(*parts(link)).read_bytes() == bytes(4)
    with pytest.raises(FileNotFound):
        files.get(*parts(files.keep(bytes(11), "png")))
    assert len(files) == 0


def test_links_outlive_a_restart_where_their_folder_does(tmp_path: Path) -> None:
    link = SignedFiles(tmp_path / "links").keep(b"picture", "webp")
    (tmp_path / "links" / f"file-{'0' * 24}.png.part").write_bytes(b"half a pic")

    again = SignedFiles(tmp_path / "links")

    assert again.get(*parts(link)).read_bytes() == b"picture"
    assert len(again) == 1
    kept = {path.suffix: path.stat().st_mode & 0o777 for path in (tmp_path / "links").iterdir()}
    assert kept.keys() == {".webp", ""}
    assert kept[""] == 0o600  # the secret


def test_no_link_leads_elsewhere_and_nobody_can_sign_one(tmp_path: Path) -> None:
    (tmp_path / "other.png").write_bytes(b"private")
    files = SignedFiles(tmp_path / "links")
    _, expires, signature = parts(files.keep(b"picture", "png"))

    for name in ("../other.png", "secret", "/etc/passwd", "file-\0.png", "", "."):
        with pytest.raises(FileNotFound):
            files.get(name, expires, signature)


def test_a_picture_that_cannot_be_stored_is_a_failure_that_may_be_tried_again(
    tmp_path: Path,
) -> None:
    files = SignedFiles(tmp_path / "links")
    shutil.rmtree(tmp_path / "links")

    with pytest.raises(StoreFailed, match="could not be stored"):
        files.keep(b"picture", "png")


def test_a_link_of_another_server_is_not_ours(tmp_path: Path) -> None:
    link = SignedFiles(tmp_path / "a", clock=lambda: 0.0).keep(b"picture", "png")

    with pytest.raises(FileNotFound):
        SignedFiles(tmp_path / "b", clock=lambda: 0.0).get(*parts(link))


def test_the_client_is_told_once_that_its_prompt_was_truncated() -> None:
    class Truncating(Grey):
        async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
            done = await super().submit(request)
            done.warnings = ["your prompt was truncated"]
            return done

    told = ask(json.dumps({"prompt": "a", "n": 2}), worker=Truncating()).json()
    plain = ask(json.dumps({"prompt": "a"})).json()

    assert told["warnings"] == ["your prompt was truncated"]
    assert plain["warnings"] is None


# Lists of prompts


def test_lists_of_prompts_are_requests_with_seeds_in_order() -> None:
    worker = Grey()

    answer = draw(
        worker, prompt=["a cat", "a dog"], negative_prompt=["dark", "red"], n=2, seed=7
    ).json()

    said = [(one.arguments["prompt"], one.arguments["negative_prompt"]) for one in worker.jobs]
    assert said == [("a cat", "dark"), ("a cat", "dark"), ("a dog", "red"), ("a dog", "red")]
    assert [one.seed for one in worker.jobs] == [7, 8, 9, 10]
    assert [one["seed"] for one in answer["data"]] == [7, 8, 9, 10]
    assert [one.group_size for one in worker.jobs] == [2] * 4  # as if asked for one by one
    assert len({one.group for one in worker.jobs}) == 2
    assert len({one.request_id for one in worker.jobs}) == 4
    assert answer["usage"]["input_tokens"] == 2  # each prompt counts once
    assert answer["usage"]["output_tokens"] == 4


def test_a_list_of_one_prompt_is_that_prompt_and_one_negative_prompt_is_for_all() -> None:
    worker = Grey()

    assert draw(worker, prompt=["a cat"], negative_prompt=["dark"]).status_code == 200
    assert draw(worker, prompt=["a cat", "a dog"], negative_prompt="dark").status_code == 200

    said = [(one.arguments["prompt"], one.arguments["negative_prompt"]) for one in worker.jobs]
    assert said == [("a cat", "dark"), ("a cat", "dark"), ("a dog", "dark")]


def test_a_stream_of_several_prompts_tells_which_picture_is_whose() -> None:
    answer = draw(Grey(), prompt=["a cat", "a dog"], seed=3, stream=True)

    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
    assert [(one["image_index"], one["seed"]) for one in events] == [(0, 3), (1, 4)]
    assert [one["usage"]["input_tokens"] for one in events] == [1, 1]


def test_the_document_says_that_prompts_may_be_lists() -> None:
    known = ask("", "/openapi.json", method="GET").json()["components"]["schemas"]

    taken = known["ImageRequest"]["properties"]["prompt"]["anyOf"]
    assert [one["type"] for one in taken] == ["string", "array"]


# Skipped steps


class Skipping(Grey):
    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        done = await super().submit(request)
        done.skipped_steps = 3 if request.step_cache else 0
        return done


def test_the_body_or_a_header_says_how_much_may_be_skipped_and_the_answer_how_much_was() -> None:
    said: list[tuple[dict[str, Any], dict[str, str], float | None]] = [
        ({"step_cache": 0.2}, {}, 0.2),
        ({}, {"x-step-cache": "0.1"}, 0.1),
        ({"step_cache": 0}, {"x-step-cache": "0.1"}, 0.0),  # the body wins
        ({}, {}, None),
    ]
    for body, headers, threshold in said:
        worker = Skipping()
        answer = ask(json.dumps({"prompt": "a", **body}), worker=worker, headers=headers)

        assert worker.jobs[0].step_cache == threshold
        assert "step_cache" not in worker.jobs[0].arguments
        assert answer.json()["data"][0]["skipped_steps"] == (3 if threshold else None)


@pytest.mark.parametrize("header", ["2", "much", "-1", ""])
def test_a_header_that_is_no_threshold_is_refused_by_its_name(header: str) -> None:
    answer = ask(json.dumps({"prompt": "a"}), headers={"x-step-cache": header})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "step_cache"
