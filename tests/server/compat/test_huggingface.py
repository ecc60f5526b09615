"""`huggingface_hub.InferenceClient(base_url=...)`, unmodified, against a real server."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import HfHubHTTPError

from support.app import Grey, ask, refusal
from support.forms import BOTH, worker_of
from support.pictures import picture, png
from support.running import Running


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests keep the library from the network; its client is to reach the loopback server."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Grey, str]]:
    worker = worker_of(BOTH)
    with Running(worker) as url:
        yield worker, url


def test_text_to_image_gets_a_picture(running: tuple[Grey, str]) -> None:
    worker, url = running
    client = InferenceClient(base_url=url)

    image = client.text_to_image(
        "a cat", negative_prompt="dogs", width=32, height=48, num_inference_steps=3, seed=7,
        guidance_scale=2.0,
    )  # fmt: skip

    assert image.size == (16, 16)
    job = worker.jobs[-1]
    assert job.seed == 7
    assert job.arguments == {
        "prompt": "a cat", "negative_prompt": "dogs", "width": 32, "height": 48,
        "num_inference_steps": 3, "guidance_scale": 2.0,
    }  # fmt: skip


def test_image_to_image_draws_a_picture_anew(running: tuple[Grey, str]) -> None:
    worker, url = running
    client = InferenceClient(base_url=url)
    size: Any = {"width": 64, "height": 32}

    image = client.image_to_image(png(32, 48), prompt="blue", target_size=size, strength=0.5)

    assert image.size == (16, 16)
    arguments = worker.jobs[-1].arguments
    assert (arguments["prompt"], arguments["strength"]) == ("blue", 0.5)
    assert (arguments["width"], arguments["height"]) == (64, 32)
    assert arguments["image"].size == (32, 48)


def test_image_to_image_without_parameters_sends_the_file(running: tuple[Grey, str]) -> None:
    worker, url = running

    assert InferenceClient(base_url=url).image_to_image(png(32, 48)).size == (16, 16)
    assert worker.jobs[-1].arguments["image"].size == (32, 48)


def test_the_error_says_what_was_wrong(running: tuple[Grey, str]) -> None:
    with pytest.raises(HfHubHTTPError, match="num_inference_steps=0"):
        InferenceClient(base_url=running[1]).text_to_image("a", num_inference_steps=0)


def test_the_key_is_the_clients_token() -> None:
    with Running(Grey(), api_key=("secret",)) as url:
        with pytest.raises(HfHubHTTPError, match="401"):
            InferenceClient(base_url=url, api_key="other").text_to_image("a")
        assert InferenceClient(base_url=url, api_key="secret").text_to_image("a").size == (16, 16)


def test_the_answer_is_of_the_kind_that_is_accepted() -> None:
    for accept, kind in (("image/webp", "WEBP"), ("*/*", "PNG"), ("image/jpeg", "JPEG")):
        answer = ask('{"inputs": "a"}', "/", worker=Grey(), headers={"accept": accept})
        assert picture(answer.content).format == kind
        assert answer.headers["x-seed"].isdecimal()


WRONG: list[tuple[Any, str, str | None]] = [
    ({}, "missing_parameter", "inputs"),
    ({"inputs": 7}, "invalid_value", "inputs"),
    ({"inputs": "a", "options": {}}, "unknown_parameter", "options"),
    ({"inputs": "a", "parameters": {"prompt": "b"}}, "invalid_value", "prompt"),
    ({"inputs": "a", "parameters": {"n": 2}}, "unsupported_parameter", "n"),
    ({"inputs": "a", "parameters": {"stream": True}}, "unsupported_parameter", "stream"),
    ({"inputs": "a", "parameters": {"scheduler": "Euler"}}, "invalid_value", "scheduler"),
    ({"inputs": "a", "parameters": {"target_size": 7}}, "invalid_value", "target_size"),
    ({"inputs": "iVBORw0KGgo=", "parameters": {}}, "unsupported_image", "inputs"),
    ({"inputs": "data:image/png;base64,####"}, "invalid_value", "inputs"),
]


@pytest.mark.parametrize(("body", "code", "param"), WRONG, ids=str)
def test_what_is_wrong_is_refused_by_name(body: Any, code: str, param: str | None) -> None:
    worker = worker_of(BOTH)

    told = refusal(ask(json.dumps(body), "/", worker=worker))

    assert (told["code"], told["param"], worker.jobs) == (code, param, [])


def test_a_picture_where_none_is_taken_is_refused() -> None:
    body = {"inputs": "a", "parameters": {"x": base64.b64encode(png(1000, 800)).decode()}}

    told = refusal(ask(json.dumps(body), "/", worker=worker_of(BOTH)))

    assert (told["code"], told["param"]) == ("invalid_value", "x")


def test_a_body_of_another_kind_is_refused() -> None:
    for kind, content in (("text/plain", b"a"), ("image/png", b"")):
        told = refusal(ask(content, "/", headers={"content-type": kind}))
        assert told["code"] in ("unsupported_media_type", "missing_parameter", "invalid_json")
