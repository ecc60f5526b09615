"""`enhance_prompt` over HTTP: the rewritten prompt is in the answer, the file and the job."""

import base64
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from carpool.request.enhancement import REWRITER
from carpool.types import CheckedRequest
from carpool.worker import protocol
from support.app import CARD, AppClient, Grey, open_app


class Writing(Grey):
    """Its rewriter puts a frame around each prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = protocol.WorkerReady(replace(CARD, enhancer=REWRITER), {}, 0.0)

    async def submit(self, request: CheckedRequest, *_: Any, **followers: Any) -> protocol.Done:
        done = await super().submit(request)
        if request.enhance_prompt:
            if followers.get("on_preview") is not None:
                about = request.request_id, 0, 0, None, "a cat, fr"
                followers["on_preview"](protocol.Preview(*about, is_prompt=True))
            prompt = f"{request.arguments['prompt']}, framed"
            done.settings = {"enhance_prompt": True, "revised_prompt": prompt}
        return done


async def drawn(opened: AppClient, **extra: Any) -> tuple[Any, dict[str, Any]]:
    """A picture, and the metadata in its file."""
    answer = await opened.openai.images.generate(prompt="a cat", extra_body=extra)
    [picture] = answer.data or []
    file: Any = Image.open(io.BytesIO(base64.b64decode(picture.b64_json or "")))
    return picture, json.loads(file.text["carpool"])


async def test_a_picture_and_its_file_have_the_rewritten_prompt_and_so_has_a_chat() -> None:
    async with open_app(Writing(), metadata_prompt=True) as opened:
        picture, told = await drawn(opened, enhance_prompt=True)
        assert picture.revised_prompt == "a cat, framed"
        assert (told["prompt"], told["revised_prompt"]) == ("a cat", "a cat, framed")
        assert told["enhance_prompt"] is True
        assert (await drawn(opened))[0].revised_prompt is None

        body = {"messages": [{"role": "user", "content": "a cat"}], "enhance_prompt": True}
        for stream in (False, True):
            asked = body | {"stream": stream}
            answer = await opened.http.post("/v1/chat/completions", json=asked)
            assert '"revised_prompt":"a cat, framed"' in answer.text.replace(": ", ":")


async def test_a_server_that_rewrites_by_default_tells_automatic1111s_clients() -> None:
    worker, card = Writing(), replace(CARD, enhancer=REWRITER, enhances=True)
    worker.ready = protocol.WorkerReady(card, {}, 0.0)
    async with open_app(worker) as opened:
        answer = await opened.http.post("/sdapi/v1/txt2img", json={"prompt": "a cat"})
    assert 'Revised prompt: "a cat, framed"' in json.loads(answer.json()["info"])["infotexts"][0]


async def test_a_stream_and_a_job_have_it_too() -> None:
    async with open_app(Writing(), metadata_prompt=True) as opened:
        stream: Any = await opened.openai.images.generate(
            prompt="a cat", stream=True, extra_body={"enhance_prompt": True}
        )
        told, event = [event async for event in stream]
        assert told.type == "image_generation.revised_prompt"
        assert told.revised_prompt == "a cat, fr"
        assert event.revised_prompt == "a cat, framed"

        body = {"prompt": "a cat", "enhance_prompt": True, "background_job": True}
        job = (await opened.http.post("/v1/images/generations", json=body)).json()
        ended = await opened.ended(job["id"])
        assert ended["revised_prompt"] == "a cat, framed"
        [content] = await opened.files(ended)
        told = json.loads(Image.open(io.BytesIO(content)).text["carpool"])  # type: ignore[attr-defined]
        assert told["revised_prompt"] == "a cat, framed"


@pytest.mark.parametrize(("worker", "can"), [(Writing, True), (Grey, False)])
async def test_a_model_lists_it_where_it_can(worker: type[Grey], *, can: bool) -> None:
    async with open_app(worker()) as opened:
        [model] = (await opened.http.get("/v1/models")).json()["data"]
        assert ("enhance_prompt" in str(model)) == can
        body = {"prompt": "a", "enhance_prompt": True}
        answer = await opened.http.post("/v1/images/generations", json=body)
        assert answer.status_code == (200 if can else 400)
        if not can:
            assert "--rewriter" in answer.json()["error"]["message"]


async def test_a_file_that_may_not_name_prompts_has_neither() -> None:
    async with open_app(Writing(), metadata_prompt=False) as opened:
        _, told = await drawn(opened, enhance_prompt=True)
        assert "cat" not in str(told)
