"""`POST /v1/chat/completions` of language models, with OpenAI's own SDK and a real server."""

import base64
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image

from support.server_process import Server, eventually, serving
from support.tiny import tiny_pipeline
from support.tiny.writers import save_seer, save_writer

ASKED: Any = [
    {"role": "system", "content": "answer in verse"},
    {"role": "user", "content": [{"type": "text", "text": "a red circle on a blue background"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_writer(tmp_path_factory.mktemp("models") / "writer")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving("--workers", "1", model=str(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def write(seed: int = 0, messages: Any = ASKED, **options: Any) -> str:
        texts = [
            message if isinstance(message["content"], str)
            else {**message, "content": "\n".join(part["text"] for part in message["content"])}
            for message in messages
        ]  # fmt: skip
        inputs = tokenizer.apply_chat_template(
            texts, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        torch.manual_seed(seed)
        with torch.no_grad():
            ids = model.generate(**inputs, pad_token_id=0, **options)
        new = ids[0, inputs["input_ids"].shape[1] :]
        return str(tokenizer.decode(new, skip_special_tokens=True))

    return write


def ask(client: openai.OpenAI, messages: Any = ASKED, **options: Any) -> Any:
    return client.chat.completions.create(messages=messages, **{"model": "writer", **options})


def test_a_greedy_answer_is_that_of_generate_with_its_tokens_counted(
    client: openai.OpenAI, plain: Any
) -> None:
    answer = ask(client, max_completion_tokens=20, temperature=0)

    [choice] = answer.choices
    assert choice.message.content == plain(max_new_tokens=20, do_sample=False)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20
    assert answer.usage.prompt_tokens_details.text_tokens == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens_details.text_tokens == 20
    assert answer.model == "writer"


def test_sampled_answers_are_those_of_generate_with_seeds_one_after_another(
    client: openai.OpenAI, plain: Any
) -> None:
    answer = ask(client, max_tokens=16, temperature=0.8, top_p=0.9, seed=7, n=3)

    expected = [
        plain(seed, max_new_tokens=16, do_sample=True, temperature=0.8, top_p=0.9)
        for seed in (7, 8, 9)
    ]
    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(expected)) == 3
    assert answer.usage.completion_tokens == 48


def test_a_stream_has_a_chunk_a_token_and_the_same_text(client: openai.OpenAI) -> None:
    asked: Any = {"max_tokens": 24, "temperature": 1.2, "seed": 3, "n": 2}
    whole = ask(client, **asked)
    chunks = list(ask(client, **asked, stream=True, stream_options={"include_usage": True}))

    *pieces, last = chunks
    texts = ["", ""]
    ends = {}
    for chunk in pieces:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len(pieces) > 30
    assert last.choices == []
    assert last.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_before_it(
    client: openai.OpenAI, plain: Any, stream: bool
) -> None:
    full = plain(max_new_tokens=30, do_sample=False)
    stop = full[12:15]
    answer = ask(client, max_tokens=30, temperature=0, stop=[stop, "never this"], stream=stream)

    if stream:
        parts = [chunk.choices[0] for chunk in answer]
        text = "".join(part.delta.content or "" for part in parts)
        reason, tokens = parts[-1].finish_reason, 0
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        tokens = answer.usage.completion_tokens
    assert text == full[: full.index(stop)]
    assert reason == "stop"
    assert tokens < 30


def test_a_stream_gives_what_was_held_back_in_case_it_began_a_stop_text(
    client: openai.OpenAI, plain: Any
) -> None:
    full = plain(max_new_tokens=9, do_sample=False)
    chunks = ask(client, max_tokens=9, temperature=0, stop=[full[-1] + "\x01"], stream=True)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == full


def test_a_deadline_is_refused_where_texts_were_longer_and_limits_count(
    client: openai.OpenAI,
) -> None:
    ask(client, max_tokens=100, temperature=0)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="cannot be met"):
            ask(client, max_tokens=100, stream=stream, extra_body={"deadline_s": 0.001})
    assert ask(client, max_tokens=1, extra_body={"deadline_s": 100}).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("field", "value"), [("store", True), ("metadata", {"a": "b"}), ("service_tier", "flex")]
)
def test_fields_without_effect_are_warned_about_but_not_their_usual_values(
    client: openai.OpenAI, field: str, value: Any
) -> None:
    usual: Any = {"store": False, "metadata": {}, "service_tier": "auto"}
    warning = [f"{field} has no effect on texts"]
    assert ask(client, max_tokens=1, **{**usual, field: value}).warnings == warning
    assert "warnings" not in ask(client, max_tokens=1, **usual).model_extra
    *_, last = ask(client, max_tokens=1, **{field: value}, stream=True)
    assert last.warnings == warning


def test_answers_of_clients_at_once_are_those_of_each_alone(
    client: openai.OpenAI, plain: Any, server: Server
) -> None:
    def one(number: int) -> str:
        asked = [{"role": "user", "content": "a star " * (number + 1)}]
        options = {"max_tokens": 6 + 5 * number, "temperature": 0.5 + 0.2 * number}
        return str(ask(client, asked, seed=number, **options).choices[0].message.content)

    before = server.stats()["tokens"]
    with ThreadPoolExecutor(5) as threads:
        texts = list(threads.map(one, range(5)))

    assert texts == [
        plain(
            number, [{"role": "user", "content": "a star " * (number + 1)}],
            max_new_tokens=6 + 5 * number, do_sample=True, temperature=0.5 + 0.2 * number,
        )
        for number in range(5)
    ]  # fmt: skip
    assert server.stats()["tokens"] - before == sum(6 + 5 * number for number in range(5))


CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function"}]}
ANSWER = {"role": "assistant", "content": "a"}
DRAWN = {"role": "assistant", "content": "a", "images": [{"type": "image_url"}]}
BLACK = Image.fromarray(np.zeros((8, 8, 3), np.uint8))


def _picture(image: Image.Image = BLACK) -> Any:
    out = io.BytesIO()
    image.save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("options", "param", "text"),
    [
        ({"messages": [{"role": "user", "content": "  "}]}, "messages", "at least a word"),
        ({"messages": [{"role": "user", "content": "a " * 100_000}]}, "messages", "at most 32000"),
        ({"messages": [{"role": "user", "content": "a 5 " * 400}]}, "messages", "context has 256"),
        ({"messages": [{"role": "user", "content": [_picture()]}]}, "messages", "texts alone"),
        ({"messages": [{"role": "poet", "content": "a"}]}, "messages", "must be one of system"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages", "must be"),
        ({"messages": [{"role": "user", "contnt": "a"}]}, "messages", "did you mean 'content'"),
        ({"stop": [f"stop {i}" for i in range(1000)]}, "stop", "at most 16"),
        ({"stop": [""]}, "stop", "1 to 256"),
        ({"stop": 5}, "stop", "1 to 256"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to"),
        ({"max_completion_tokens": -3}, "max_completion_tokens", "from 1 to"),
        ({"max_tokens": 4000}, "max_tokens", "the context has 256"),
        ({"temperature": -1}, "temperature", "from 0 to 100"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"top_logprobs": 5}, "top_logprobs", "not supported"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", "no text of the user"),
        ({"n": 65}, "n", "from 1 to 10"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"messages": [CALLS, *ASKED]}, "messages", "tool_calls of a message is not supported"),
        ({"messages": [{**DRAWN, "role": "user"}]}, "messages", "'images' is no field"),
        ({"messages": [DRAWN, *ASKED]}, "messages", "images of a message is not supported"),
        ({"messages": [*ASKED, {**ANSWER, "prefix": True}]}, "messages", "prefix of a message is"),
        ({"messages": [{**ANSWER, "refusal": "no"}, *ASKED]}, "messages", "refusal of a message"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "send one of them"),
        ({"extra_body": {"background_job": True}}, "background_job", "stream=true sends them"),
        ({"extra_body": {"enhance_prompt": True}}, "enhance_prompt", "no model that rewrites"),
        ({"frequency_penalty": 1}, "frequency_penalty", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "only texts"),
        ({"extra_body": {"num_inference_steps": 4}}, "num_inference_steps", "no parameter"),
        ({"extra_body": {"lora": [{"id": "ink", "scale": 1}]}}, "lora", "ink"),
        ({"extra_body": {"scheduler": "euler"}}, "scheduler", "euler"),
        ({"model": "nonsense"}, None, "not served here"),
        ({"extra_body": {"size": "64x64"}}, "size", "not supported"),
        ({"extra_body": {"webhook": "https://a.example"}}, "webhook", "not supported"),
        ({"extra_body": {"image_config": {"image_size": "1K"}}}, "image_config", "for pictures"),
        ({"extra_body": {"return_stage_metrics": True}}, "return_stage_metrics", "for pictures"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name_also_to_a_stream(
    client: openai.OpenAI, options: Any, param: str | None, text: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError, match=text) as refusal:
            ask(client, **options, stream=stream)
        assert refusal.value.status_code in (400, 404)
        assert refusal.value.body["param"] == param  # type: ignore[index]


def test_pictures_are_refused_by_the_name_of_the_endpoint_for_texts(server: Server) -> None:
    answer = server.draw()

    assert answer.status_code == 400
    assert "POST /v1/chat/completions" in answer.json()["error"]["message"]


def test_a_retry_with_the_same_key_gets_the_same_answer(client: openai.OpenAI) -> None:
    options: Any = {"max_tokens": 9, "temperature": 1, "extra_headers": {"Idempotency-Key": "a"}}
    assert ask(client, **options).id == ask(client, **options).id


STAR: Any = [{"role": "user", "content": "a star"}]
LONG: Any = {"temperature": 0.9, "seed": 5, "max_tokens": 200, "stream": True}


def test_a_client_that_leaves_ends_its_texts(client: openai.OpenAI, server: Server) -> None:
    began, stream = server.stats()["tokens"], ask(client, n=8, **LONG)
    [next(stream) for _ in range(4)]
    stream.close()

    eventually(lambda: server.stats()["running"] == 0, 60, "the texts end")
    assert server.stats()["tokens"] - began < 8 * 200


def test_a_text_goes_on_after_its_worker(client: openai.OpenAI, plain: Any, server: Server) -> None:
    expected = plain(5, STAR, max_new_tokens=200, do_sample=True, temperature=0.9)

    def tokens_again() -> int:  # 0: the text ended before its worker
        stream = ask(client, STAR, **LONG)
        texts = [next(stream).choices[0].delta.content or "" for _ in range(80)]
        os.kill(server.worker(), signal.SIGKILL)
        texts += [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(texts) == expected
        eventually(lambda: "tokens" in server.stats(), 60, "the next worker answers")
        return int(server.stats()["tokens"])

    assert 0 < next(filter(None, (tokens_again() for _ in range(9)))) <= 160


class Several(NamedTuple):
    """A server of several models."""

    folder: Path
    client: openai.OpenAI


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Several"]:
    """A server of a model with eyes, and of a pipeline that draws with a language model inside."""
    root = tmp_path_factory.mktemp("models")
    save_seer(root / "seer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        tiny_pipeline("flux2").save_pretrained(root / "draws")
    models = [f"{name}={root / name}" for name in ("seer", "draws")]
    with (
        serving(*models, model="") as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=9) as sdk,
    ):
        yield Several(root, sdk)


def _seen(texts: list[Any], picture: Any) -> Any:
    parts = [{"type": "text", "text": text} for text in texts]
    return [{"role": "user", "content": [p for p in (parts[0], picture, *parts[1:]) if p]}]


def test_a_model_with_eyes_answers_about_pictures(several: Several) -> None:
    processor = transformers.AutoProcessor.from_pretrained(several.folder / "seer")
    model = transformers.AutoModelForImageTextToText.from_pretrained(several.folder / "seer").eval()
    options: Any = {"temperature": 0.7, "top_p": 0.9}
    texts = []
    for shade in (0, 130, None):
        image = shade is not None and Image.fromarray(np.full((30, 40, 3), shade, np.uint8))
        words = ["what is", "?"] if image else ["what is"]
        asked = _seen(words, image and {"type": "image", "image": image})
        inputs = processor.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        torch.manual_seed(4)
        with torch.no_grad():
            ids = model.generate(
                **inputs, max_new_tokens=10, do_sample=True, pad_token_id=0, **options
            )
        new = ids[0, inputs["input_ids"].shape[1] :]
        expected = processor.tokenizer.decode(new, skip_special_tokens=True)
        asked = _seen(words, image and _picture(image))
        answer = ask(several.client, asked, model="seer", max_tokens=10, seed=4, **options)
        texts.append(answer.choices[0].message.content)
        assert texts[-1] == expected
        assert answer.usage.prompt_tokens == inputs["input_ids"].shape[1]
        pictures = int((inputs["input_ids"] == model.config.image_token_id).sum())
        assert answer.usage.prompt_tokens_details.image_tokens == pictures
    assert texts[0] != texts[1]


def test_a_language_model_inside_of_a_pipeline_answers_by_its_name(several: Several) -> None:
    model = transformers.Mistral3ForConditionalGeneration.from_pretrained(
        several.folder / "draws" / "text_encoder"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(several.folder / "draws" / "tokenizer")
    asked: Any = [{"role": "user", "content": "a red circle"}]
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=9, do_sample=False)
    new = ids[0, inputs["input_ids"].shape[1] :]

    answer = ask(several.client, asked, model="draws/text_encoder", max_tokens=9, temperature=0)

    assert answer.model == "draws/text_encoder"
    assert several.client.models.retrieve("draws").writers == ["text_encoder"]  # type: ignore[attr-defined]
    assert answer.choices[0].message.content == tokenizer.decode(new, skip_special_tokens=True)


def test_the_pipeline_around_a_language_model_still_answers_with_pictures(several: Several) -> None:
    size = {"size": "16x16", "num_inference_steps": 2, "text_encoder_out_layers": [1, 2, 3]}
    answer = ask(several.client, [{"role": "user", "content": "a"}], model="draws", extra_body=size)

    assert answer.choices[0].message.content[0]["type"] == "image_url"


@pytest.mark.parametrize("name", ["draws/vae", "text_encoder", "draws/", "paints"])
def test_a_name_of_no_language_model_is_not_found(several: Several, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="model"):
        ask(several.client, model=name)
