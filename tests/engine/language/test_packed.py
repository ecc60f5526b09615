"""Tokens of several texts in one forward: every way to write, failures, models of one's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP

from carpool.engine.language import parts
from carpool.engine.language.parts import BLOCK
from carpool.errors import OutOfMemory
from support.engine_driver import Drive, Recorder, driving
from support.language import Author, Text, assert_as_alone, author, texts

TWO = {
    "input_ids": torch.tensor([[0, 0, 7, 9, 11], [4, 5, 6, 7, 8]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
}
PADDED = {name: value[:1] for name, value in TWO.items()}
SAMPLED = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": True}
WAYS: dict[str, dict[str, Any]] = {  # of which those in the first line share forwards
    **{"plain": {}, "penalty": {"repetition_penalty": 1.3}, "chunks": {"prefill_chunk_size": 4}},
    "beams": {"num_beams": 3, "do_sample": False},
    "several": {"num_return_sequences": 3, "do_sample": True},
    "padded": {**PADDED, **SAMPLED},
    "two prompts": {**TWO, **SAMPLED},
    "static cache": {"cache_implementation": "static"},
    "looked up": {"prompt_lookup_num_tokens": 3, "do_sample": False},
    "guided": {"guidance_scale": 1.5},
    "without cache": {"use_cache": False},
}


def ways(name: str) -> list[Text]:
    return [{**texts(name)[i % 5], **way} for i, way in enumerate(WAYS.values())]


def submit_all(drive: Drive, pipe: Author) -> list[Recorder]:
    heard = [drive.submit(str(number), seed=number) for number in range(len(pipe.texts))]
    drive.finish()
    return heard


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_way_to_write_gives_what_it_gives_alone(name: str, numerics: str) -> None:
    pipe, judge = author(name), author(name)
    pipe.texts = judge.texts = ways(name)
    with driving(pipe, numerics=numerics) as drive:
        heard = submit_all(drive, pipe)

    assert_as_alone(heard, judge)
    assert drive.widest("text_encoder", "generate") >= 3


@pytest.mark.parametrize("error", [RuntimeError("a kernel"), torch.OutOfMemoryError("full")])
def test_a_forward_that_fails_leaves_no_text_a_token_twice(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaMLP.forward
    calls = prompts = 0

    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        nonlocal calls, prompts
        tokens = x.shape[0] * x.shape[1]
        calls, prompts = calls + 1, prompts + (tokens > BLOCK)
        is_prompt = tokens > BLOCK and prompts == 2 and type(error) is torch.OutOfMemoryError
        if is_prompt or (x.shape[0] > 2 and calls % 3 == 0):  # behind a layer that has grown caches
            raise error
        y: Tensor = plain(self, x)
        return y

    pipe = author("llama")
    with monkeypatch.context() as patched, driving(pipe) as drive:
        patched.setattr(LlamaMLP, "forward", forward)
        heard = submit_all(drive, pipe)

    assert_as_alone(heard, author("llama"))
    assert drive.widest("text_encoder", "generate") >= 2


@pytest.mark.parametrize("name", ["llama", "qwen3.5", "t5", "glm"])
def test_a_lone_token_that_runs_out_of_memory_is_not_written_twice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With beams, with linear attention, after an encoder; a prompt with its own positions."""
    beams = {"num_beams": 3, "do_sample": False} if name == "llama" else {}

    def made() -> Author:
        pipe = author(name)
        pipe.texts = [{**text, **beams} for text in pipe.texts]
        return pipe

    pipe = made()
    model: Any = pipe.text_encoder
    *_, layers = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    last, calls = layers[-1], 0
    plain = type(last).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += self is last
        if self is last and calls in (1, 5):  # behind layers that have grown the cache
            raise torch.OutOfMemoryError("full")
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patched, driving(pipe) as drive:
        patched.setattr(type(last), "forward", forward)
        heard = drive.submit("1", seed=1)
        drive.finish()

    if name in ("qwen3.5", "t5"):  # what a forward adds there cannot be taken back
        assert isinstance(heard.error, OutOfMemory)
    else:
        torch.manual_seed(1)
        with torch.no_grad():
            text = made()("1", generator=torch.Generator().manual_seed(1))["text"]
        assert heard.outcome.fields["text"].tolist() == text.tolist()


class Honest(LlamaModel):  # type: ignore[misc]
    """Layers of one's own."""


class Closed(LlamaModel):  # type: ignore[misc]
    """Layers whose arguments have no names."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Mixing(LlamaModel):  # type: ignore[misc]
    """Layers that look at the other rows of the batch."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
        past_key_values: Any = None, inputs_embeds: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        answer = super().forward(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, **kwargs
        )
        hidden = answer.last_hidden_state
        answer.last_hidden_state = hidden + hidden.mean(0, keepdim=True)
        return answer


@pytest.mark.parametrize(("cls", "is_shared"), [(Honest, True), (Mixing, False), (Closed, False)])
def test_layers_of_ones_own_are_proven_before_they_share(cls: type, *, is_shared: bool) -> None:
    def made() -> Author:
        pipe = author("llama")
        pipe.text_encoder.model.__class__ = cls
        pipe.texts = [{**pipe.texts[2], "max_new_tokens": 20, "min_new_tokens": 20}] * 3
        return pipe

    pipe = made()
    with driving(pipe) as drive:
        heard = submit_all(drive, pipe)

    assert_as_alone(heard, made())
    assert (drive.widest("text_encoder", "generate") > 1) == is_shared


def test_large_heads_share_forwards_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LARGE_HEAD", 1)
    pipe = author("qwen3")
    with driving(pipe) as drive:
        heard = submit_all(drive, pipe)

    assert_as_alone(heard, author("qwen3"))
    assert drive.widest("text_encoder", "logits") >= 3
    assert drive.engine.statistics()["tokens"] == sum(drive.widths("text_encoder", "generate"))
