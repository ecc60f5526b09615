"""`POST /v1/chat/completions`, with OpenAI's own SDK and as OpenRouter and vLLM-Omni shape it."""

import base64
import json
from typing import Any

import httpx2
import pytest

from carpool.request.card import Card
from carpool.server.compat.chat.bodies import NEUTRAL
from carpool.types import CheckedRequest
from carpool.worker import protocol
from support.app import CARD, Grey, ask, open_app, refusal
from support.forms import BOTH, SEVERAL
from support.pictures import picture, png

CHAT = "/v1/chat/completions"
PEAK = {"memory": {"peak_bytes": 2_500_000}}


class Talking(Grey):
    """A fake worker that knows its memory."""

    def __init__(self, card: Card = CARD, *, is_slow: bool = False) -> None:
        super().__init__(is_slow=is_slow)
        self.ready = protocol.WorkerReady(card, {}, 0.0)

    async def statistics(self) -> dict[str, Any]:
        return PEAK


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def part(content: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def say(worker: Grey | None = None, content: Any = "a cat", **fields: Any) -> httpx2.Response:
    body = {"messages": [user(content)], **fields}
    return ask(json.dumps(body), CHAT, worker=worker or Talking())


class Skipping(Talking):
    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        done = await super().submit(request)
        done.skipped_steps = 3 if request.step_cache else 0
        return done


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("threshold", [0.2, None])
def test_a_picture_says_how_many_of_its_steps_were_skipped(
    stream: bool, threshold: float | None
) -> None:
    body: dict[str, Any] = {"stream": stream, "modalities": ["image"], "step_cache": threshold}
    text = say(Skipping(), **{name: one for name, one in body.items() if one is not None}).text

    assert ('"skipped_steps":3' in text.replace(" ", "")) is (threshold is not None)
    assert ("skipped_steps" in text) is (threshold is not None)


def drawn(url: str) -> Any:
    head, _, b64 = url.partition(",")
    assert head == "data:image/png;base64"
    return picture(base64.b64decode(b64, validate=True))


async def test_the_sdk_gets_pictures_beside_the_message_as_openrouter_has_them() -> None:
    worker = Talking()

    async with open_app(worker) as opened:
        extra = {"modalities": ["image", "text"], "seed": 7, "num_inference_steps": 3}
        answer = await opened.openai.chat.completions.create(
            model="grey", messages=[user("a cat")], n=2, temperature=0.2, extra_body=extra
        )
        [choice] = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "")
        assert choice.finish_reason == "stop"
        images: Any = choice.message.model_extra
        assert [drawn(one["image_url"]["url"]).size for one in images["images"]] == [(16, 16)] * 2
        assert [one["seed"] for one in images["images"]] == [7, 8]
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 2
        assert answer.id.startswith("chatcmpl-")

    assert [job.arguments["prompt"] for job in worker.jobs] == ["a cat"] * 2
    assert [job.arguments["num_inference_steps"] for job in worker.jobs] == [3, 3]


@pytest.mark.parametrize("modalities", [["image", "text"], None])
async def test_the_sdk_reads_a_stream_of_chunks(modalities: Any) -> None:
    async with open_app(Talking()) as opened:
        create: Any = opened.openai.chat.completions.create
        stream = await create(
            model="grey", messages=[user("a cat")], n=2, stream=True,
            stream_options={"include_usage": True},
            extra_body={"modalities": modalities} if modalities else {},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        pictures = []
        for chunk in chunks:
            for choice in chunk.choices:
                more: Any = choice.delta.model_extra
                parts: Any = more.get("images") if modalities else choice.delta.content
                pictures += [drawn(one["image_url"]["url"]) for one in parts or []]
        assert len(pictures) == 2
        assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, None, "stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert len({chunk.id for chunk in chunks}) == 1


def test_without_modalities_pictures_are_parts_of_the_content_as_vllm_omni_has_them() -> None:
    answer = say().json()

    [choice] = answer["choices"]
    [one] = choice["message"]["content"]
    assert drawn(one["image_url"]["url"]).size == (16, 16)
    assert answer["metrics"]["peak_memory_mb"] == 2.5
    assert answer["metrics"]["stage_durations"].keys() >= {"denoise", "stage_0_gen_ms"}


def test_a_picture_in_the_message_is_edited() -> None:
    worker = Talking(BOTH)

    answer = say(worker, [{"type": "text", "text": "blue"}, part(png(32, 48))])

    assert answer.status_code == 200, answer.text
    [job] = worker.jobs
    assert (job.arguments["prompt"], job.arguments["image"].size) == ("blue", (32, 48))


def job_after(card: Card, **answer: Any) -> CheckedRequest:
    worker = Talking(card)
    messages = [user("a cat"), {"role": "assistant", **answer}, user("make it blue")]
    told = ask(json.dumps({"messages": messages}), CHAT, worker=worker)
    assert told.status_code == 200, told.text
    assert told.json()["warnings"] == [
        "only the last message is the prompt: earlier texts were not read"
    ]
    [job] = worker.jobs
    assert job.arguments["prompt"] == "make it blue"
    return job


@pytest.mark.parametrize("where", ["images", "content"])
def test_a_model_that_edits_goes_on_with_the_picture_of_the_last_answer(where: str) -> None:
    job = job_after(SEVERAL, **{"content": "", where: [part(png(32, 16))]})

    assert job.arguments["image"].size == (32, 16)


def test_a_model_that_draws_from_text_begins_anew_at_each_message() -> None:
    assert "image" not in job_after(BOTH, content=[part(png(32, 16))]).arguments


@pytest.mark.parametrize(
    ("config", "size"), [({"aspect_ratio": "16:9"}, (80, 48)), ({"image_size": "1K"}, (1024, 1024))]
)
def test_the_size_follows_an_aspect_ratio(config: dict[str, str], size: tuple[int, int]) -> None:
    worker = Talking()

    answer = say(worker, image_config=config)

    assert answer.status_code == 200, answer.text
    arguments = worker.jobs[0].arguments
    assert (arguments["width"], arguments["height"]) == size


def test_fields_about_text_change_nothing() -> None:
    worker = Talking()
    fields = dict.fromkeys(NEUTRAL, 1) | {"response_format": {"type": "text"}}

    answer = say(worker, seed=1, **fields)

    assert answer.status_code == 200, answer.text
    assert worker.jobs[0].arguments.keys() == {"prompt"}


UNSUPPORTED, OPTIONS = "unsupported_parameter", "stream_options"
WRONG: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "a"}, "invalid_value", "messages"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "invalid_value", "messages"),
    ({"messages": [user(7)]}, "invalid_value", "messages"),
    ({"messages": [user([{"type": "input_audio"}])]}, "invalid_value", "messages"),
    ({"messages": [user([7])]}, "invalid_value", "messages"),
    ({"messages": [user([{"type": "image_url", "image_url": 7}])]}, "invalid_value", "image_url"),
    ({"modalities": ["text"]}, "unsupported_parameter", "modalities"),
    ({"tools": [{"type": "function"}]}, "unknown_parameter", "tools"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ({"image_config": {"aspect_ratio": "0:9"}}, "invalid_value", "image_config"),
    ({"image_config": {"aspect_ratio": "wide"}}, "invalid_value", "image_config"),
    ({"image_config": {"image_size": "8K"}}, "invalid_value", "image_config"),
    ({"image_config": {"x": 1}}, "unsupported_parameter", "image_config.x"),
    ({"image_config": {"aspect_ratio": "1:1"}, "size": "64x64"}, "invalid_value", "image_config"),
    ({"prompt": "a"}, "unsupported_parameter", "prompt"),
    ({"background_job": True}, "unsupported_parameter", "background_job"),
    ({"model": "other"}, "model_not_found", None),
    ({"tempo": 1}, "unknown_parameter", "tempo"),
    ({"modalities": ["image", "audio"]}, "unsupported_parameter", "modalities"),
    ({"stream": True, "stream_options": {"include_usge": True}}, UNSUPPORTED, OPTIONS),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "invalid_value", OPTIONS),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"messages": [{"role": "user", "contnt": "a"}]}, "unsupported_parameter", "messages"),
    ({"messages": [user([{"type": "text", "text": "a \ud800"}])]}, "invalid_value", "messages"),
    ({"messages": [{"role": "user", "content": "a", "contnt": "a"}]}, UNSUPPORTED, "messages"),
    ({"messages": [{"role": "user"}]}, "invalid_value", "messages"),
]


@pytest.mark.parametrize(("body", "code", "param"), WRONG)
def test_what_no_picture_can_come_of_is_refused_by_name(
    body: dict[str, Any], code: str, param: str | None
) -> None:
    worker = Talking()

    told = refusal(say(worker, **body))

    assert (told["code"], told["param"], worker.jobs) == (code, param, [])


def test_a_picture_where_none_is_taken_is_refused() -> None:
    told = refusal(say(stream_options={"x": part(png(1000, 800))}))

    assert told["param"] == "stream_options"


def test_a_model_that_takes_no_picture_says_so() -> None:
    told = refusal(say(None, [{"type": "text", "text": "blue"}, part(png())]))

    assert told["code"] == "model_not_supported"


def test_a_picture_is_never_fetched_unless_allowed() -> None:
    address = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}

    told = refusal(say(Talking(BOTH), [{"type": "text", "text": "a"}, address]))

    assert told["code"] == "unsupported_parameter"


def test_the_last_chunk_of_a_stream_has_metrics_where_they_are_asked_for() -> None:
    fields: dict[str, Any] = {"stream": True, "modalities": ["image"]}
    for metrics in (True, False):
        answer = say(return_stage_metrics=metrics, **fields)
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
        last = json.loads(events[-3])
        assert last["choices"][0]["finish_reason"] == "stop"
        assert ("metrics" in last) == metrics


async def test_a_retry_with_its_key_gets_the_same_picture() -> None:
    worker = Talking()

    async with open_app(worker) as opened:
        for stream in (False, False, True, True):
            body = {"messages": [user("a cat")], "stream": stream}
            headers = {"idempotency-key": f"k{stream}"}
            answer = await opened.http.post(CHAT, json=body, headers=headers)
            assert answer.status_code == 200
            assert "data:image/png;base64," in answer.text
            assert not stream or answer.text.rstrip().endswith("[DONE]")

    assert len(worker.jobs) == 2
