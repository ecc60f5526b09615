"""Prompts of several texts in one forward: each text is the one written alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from carpool.engine.language.parts import BLOCK
from carpool.errors import Cancelled, PipelineFailed
from support.engine_driver import Drive, Recorder, driving
from support.language import MODELS, Author, Exactly, assert_as_alone, author

PACKED = [name for name in MODELS if name not in {"glm", "qwen3.5", "t5"}]
PACKED += ["deepseek3"]
LENGTHS = (1, 15, 16, 17, 100, 33, 33)  # tokens; the last two are the same prompt


class Refusing(LogitsProcessor):  # type: ignore[misc]
    """Fails at the first token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("no such word")


def ids_of(tokens: int) -> Tensor:
    return torch.tensor([[5 + (tokens + 3 * j) % 200 for j in range(tokens)]])


def made(name: str, cls: type[Author] = Author) -> Author:
    pipe = author(name, kind=cls)
    common: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5}
    common |= {"pad_token_id": 0, "do_sample": True}
    prompts = [ids_of(tokens) for tokens in LENGTHS]
    pipe.texts = [{"input_ids": i, "attention_mask": torch.ones_like(i), **common} for i in prompts]
    pipe.texts.append({**pipe.texts[3], "logits_processor": [Refusing()]})
    return pipe


def submit(drive: Drive, numbers: Any) -> list[Recorder]:
    return [drive.submit(str(number), seed=number) for number in numbers]


@pytest.mark.parametrize("name", PACKED)
def test_prompts_of_all_lengths_share_a_forward(name: str) -> None:
    with driving(made(name, Exactly), max_batch_size=32) as drive:
        heard = submit(drive, range(len(LENGTHS)))
        drive.finish()

    assert drive.widths("text_encoder", "generate") == [len(LENGTHS)] * 5
    assert_as_alone(heard, made(name, Exactly))


def test_a_prompt_that_fails_or_is_cancelled_halfway_takes_no_other_with_it() -> None:
    with driving(made("llama"), max_batch_size=32) as drive:
        drive.engine.scheduler.prompt_part = lambda component, tokens, drawing: BLOCK
        heard = submit(drive, range(len(LENGTHS)))
        given_up = drive.submit("4", seed=90, request_id="given up")
        failing = drive.submit(str(len(LENGTHS)), seed=91)
        drive.turn(2)
        drive.engine.cancel("given up")
        drive.finish()

    assert isinstance(given_up.error, Cancelled)
    assert isinstance(failing.error, PipelineFailed)
    assert drive.widest("text_encoder", "prefill") >= 4
    assert_as_alone(heard, made("llama"))


def test_a_forward_of_prompts_holds_as_many_tokens_as_fit() -> None:
    with driving(made("llama"), max_batch_size=8, mode="continuous") as drive:
        heard = submit(drive, range(len(LENGTHS)))
        drive.finish()

    assert_as_alone(heard, made("llama"))
    rows = [forward.row_counts for forward in drive.forwards if forward.method == "generate"]
    assert max(map(sum, rows)) <= 8 * BLOCK
    assert (1, 15, 16, 17) in rows
    assert (1, 1, 1, 1, 100) in rows  # a prompt beside tokens


def test_a_beginning_that_prompts_of_a_forward_share_is_computed_once() -> None:
    pipe, judge = made("llama"), made("llama")
    beginning = ids_of(6 * BLOCK)
    for author_ in (pipe, judge):
        for place in (0, 1, 2, 3):
            ids = torch.cat([beginning, ids_of(3 + place)], 1)
            added = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            author_.texts[place] = {**author_.texts[place], **added}
    with driving(pipe, conditioning_cache=64.0, max_batch_size=32) as drive:
        heard = submit(drive, range(4))
        drive.finish()
        saved = drive.engine.statistics()["conditioning"]["prefix_tokens"]

    assert saved == 3 * 6 * BLOCK
    assert drive.widths("text_encoder", "generate")[:3] == [1, 1, 4]
    assert_as_alone(heard, judge)
