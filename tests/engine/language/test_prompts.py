"""Prompts that are read in parts, and from kept beginnings on: the same tokens as at once."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from carpool.engine.language.parts import BLOCK
from carpool.engine.request import RequestState
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import CallKind
from carpool.types import Request
from support.engine_driver import Drive, Recorder, VirtualClock, driving
from support.language import MODELS, Author, Exactly, assert_as_alone, author

READ_AT_ONCE = {"glm", "t5", "longrope"}  # pictures; another cache; angles by length
UNKEPT = {*READ_AT_ONCE, "qwen3.5", "gemma3", "gemma4"}  # linear attention; windows
COMMON = torch.tensor([[5 + 3 * j % 200 for j in range(3 * BLOCK)]])  # fixed instructions


def reading(name: str, cls: type[Author] = Exactly) -> Author:
    pipe = author(name, kind=cls)
    for place, text in enumerate(pipe.texts):
        if "image_grid_thw" not in text:
            ids = torch.cat([COMMON, text["input_ids"]], 1)
            added = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            pipe.texts[place] = {**text, **added}
    return pipe


def saved(drive: Drive) -> int:
    tokens: int = drive.engine.statistics()["conditioning"]["prefix_tokens"]
    return tokens


def submit(drive: Drive, *numbers: int) -> list[Recorder]:
    drive.engine.scheduler.prompt_part = lambda component, tokens, drawing: BLOCK
    return [drive.submit(str(number), seed=number) for number in numbers]


@pytest.mark.parametrize("name", [*MODELS, "longrope"])
def test_what_prompts_have_in_common_is_read_once_and_the_rest_in_parts(name: str) -> None:
    with driving(reading(name), conditioning_cache=64.0) as drive:
        heard = submit(drive, 0, 1, 2, 3)
        drive.turn(6)
        heard += submit(drive, 4, 5)
        given_up = drive.submit("3", seed=9, request_id="given up")
        drive.turn(3)
        drive.engine.cancel("given up")
        drive.finish()

        assert (saved(drive) > 0) == (name not in UNKEPT)
        assert bool(drive.widths("text_encoder", "prefill")) == (name not in READ_AT_ONCE)
    assert given_up.error is not None
    assert_as_alone(heard, reading(name))


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_without_company_or_in_exact_numerics_a_prompt_is_read_whole(numerics: str) -> None:
    heard = list[Recorder]()
    with driving(reading("llama"), conditioning_cache=64.0, numerics=numerics) as drive:
        for number in range(3):
            heard += submit(drive, number)
            drive.turn() if numerics == "exact" else drive.finish()
        drive.finish()
        assert saved(drive) == 0
        assert not drive.widths("text_encoder", "prefill") or numerics == "fast"
    assert_as_alone(heard, reading("llama"), gap=0.0 if numerics == "exact" else 1e-4)


@pytest.mark.parametrize(("sharing", "blocks"), [("per-key", 3), ("shared", 6)])
def test_beginnings_are_shared_as_the_conditioning_cache_is(sharing: str, blocks: int) -> None:
    settings: Any = {"conditioning_cache": 64.0, "conditioning_sharing": sharing}
    with driving(reading("llama"), **settings) as drive:
        for number, tenant in enumerate("aab"):
            drive.put(Request(str(number), seed=number, tenant=tenant))
        drive.finish()
        assert saved(drive) == blocks * BLOCK


class Stepping(Author):
    """Says how many steps it has before it, by a scheduler."""

    scheduler = SimpleNamespace(timesteps=range(400))


@pytest.mark.parametrize(("begin_s", "own_s"), [(0.0, 0.0), (0.0, 0.004), (0.015, 0.004)])
def test_a_drawing_waits_about_a_step_of_its_own_while_others_begin_and_write(
    begin_s: float, own_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writers' own code, too: six beginnings, or six tokens, may take longer than a forward."""
    clock, step_s, resume = VirtualClock(), 0.045, RequestState.resume

    def resumed(state: RequestState, *args: Any, **kwargs: Any) -> Any:
        is_writing = state.timeline.phase == "encode"
        clock.pass_by(begin_s if state.parked is None else own_s if is_writing else 0.0)
        return resume(state, *args, **kwargs)

    monkeypatch.setattr(RequestState, "resume", resumed)
    with driving(reading("llama", Stepping), clock=clock, mode="continuous") as drive:
        run = (fuser := drive.engine.runner.fuser).run

        def timed(calls: Any, rows: Any) -> Any:
            ids = [call.kwargs["input_ids"] for call in calls if "input_ids" in call.kwargs]
            clock.pass_by(0.005 + 0.002 * sum(i.numel() for i in ids) if ids else step_s)
            return run(calls, rows)

        fuser.run = timed  # type: ignore[method-assign]
        drive.submit("4", seed=1)  # a prompt of 64 tokens takes 0.133 s: that is learned
        drive.finish()
        drive.submit("", seed=1, num_inference_steps=400)
        drive.turn(20)
        for number in range(6):
            drive.submit(str(number), seed=number)
        drive.finish()

    steps = [f.began_s for f in drive.forwards if f.phase == "denoise"][5:320]
    assert max(after - before for before, after in pairwise(steps)) <= 2.6 * step_s
    assert drive.widths("text_encoder", "prefill")


def test_parts_are_as_long_as_a_step_or_a_token_but_a_block_at_least() -> None:
    def part(step_s: float, token_s: float) -> int:
        token = CallKind("text_encoder.generate", 1, "token")
        tokens = {1: token_s} | {n: max(token_s, 0.001 * n) for n in (BLOCK, 512)}
        curves = {token: tokens, call.kind: {1: step_s}}
        predictor.costs = Costs({kind: Curve(seconds) for kind, seconds in curves.items()})
        return predictor.prompt_part("text_encoder", 500, [call])

    with driving(author("llama")) as drive:
        predictor = drive.engine.scheduler._predictor
        drive.submit("", seed=0)
        drive.turn(2)
        call: Any = drive.engine.running.states[0].parked

        assert [part(1.0, 0.001), part(0.13, 0.001), part(0.001, 0.512)] == [512, 128, 512]
        assert part(0.001, 0.001) == BLOCK
        assert predictor.prompt_part("text_encoder", 500, []) == 512
