"""Whoever sends a long text waits for its tokens, and nobody else does."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import carpool
from carpool.engine.tokenizers import LONG_TEXT, Tokenizers, characters
from carpool.errors import PipelineFailed
from support.engine_driver import CLOSE, Drive, driving, fresh, gap, served, solo
from support.tiny import ARGUMENTS

LONG = "a photo of a cat, a dog and a very large number of other animals. " * 100


@pytest.fixture
def drive() -> Iterator[Drive]:
    with driving("flux") as drive:
        yield drive


@pytest.fixture
def held(drive: Drive) -> list[Callable[[], Any]]:
    """Work for the other thread, which does it when the test says so."""
    work: list[Callable[[], Any]] = []
    drive.engine.parts.off_loop.host = work.append
    return work


@pytest.mark.parametrize("family", ["flux", "sdxl", "sd15"])
def test_a_long_text_gives_what_it_gives_alone(family: str) -> None:
    with driving(family) as drive:
        small = ARGUMENTS[family]
        long, short = drive.submit(LONG, seed=1, **small), drive.submit("a cat", **small)
        drive.finish()

    assert gap(long.image, solo(family, LONG, seed=1)) < CLOSE
    assert short.is_done


def test_others_are_drawn_while_a_long_text_is_tokenized(
    drive: Drive, held: list[Callable[[], Any]]
) -> None:
    long = drive.submit(LONG, seed=1, **ARGUMENTS["flux"])
    short = drive.submit("a cat", seed=2, **ARGUMENTS["flux"])

    drive.turn_until(lambda: short.is_done)

    assert not long.outcomes
    while held:
        held.pop()()
        drive.finish()
    assert gap(long.image, solo("flux", LONG, seed=1)) < CLOSE


def test_negative_prompts_and_lists_count_too(drive: Drive, held: list[Callable[[], Any]]) -> None:
    drive.submit("a cat", negative_prompt=LONG, true_cfg_scale=2.0)
    drive.turn_until(lambda: bool(held))

    assert characters(["abc", ("de", {"role": "user", "content": [{"text": "f"}]}), 7]) == 10


def test_a_request_that_is_cancelled_meanwhile_does_not_come_back(
    drive: Drive, held: list[Callable[[], Any]]
) -> None:
    long = drive.submit(LONG, request_id="long")
    drive.turn()
    drive.engine.cancel("long")
    drive.turn()
    assert long.is_done

    held.pop()()
    drive.finish()

    assert [event.kind for event in long.events][-1] == "finished"


def test_a_tokenizer_that_fails_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = fresh("flux")
    with driving(pipe) as drive:
        [_, (_, _, twin)] = drive.engine._installation._tokenizers._originals
        monkeypatch.setattr(type(twin), "__call__", refuse)
        long = drive.submit(LONG, **ARGUMENTS["flux"])
        drive.finish()
        monkeypatch.undo()
        short = drive.submit("a cat", **ARGUMENTS["flux"])
        drive.finish()

    assert isinstance(long.error, PipelineFailed)
    assert "not today" in str(long.error)
    assert short.error is None


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("not today")


def test_attributes_that_a_pipeline_sets_hold_for_long_texts() -> None:
    tokenizer = fresh("flux").tokenizer
    tokenizers = Tokenizers({"tokenizer": tokenizer, "processor": object()})
    cls = type(tokenizer)
    tokenizers.install()
    short, long = "a cat", "a cat " * LONG_TEXT
    plain = in_fiber(tokenizer, short, padding="max_length", max_length=5)

    tokenizer.padding_side = "left"
    left = in_fiber(tokenizer, short, padding="max_length", max_length=5)

    assert (isinstance(tokenizer, cls), type(tokenizer).__name__) == (True, cls.__name__)
    assert plain != left
    assert in_fiber(tokenizer, [short, long], padding=True).input_ids[0][-2:] == left.input_ids[-2:]
    tokenizers.remove()
    assert type(tokenizer) is cls


def in_fiber(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
    """What a tokenizer gives to a fiber."""
    from carpool.engine.fiber import Fiber, Returned
    from carpool.engine.tokenizers import HostCall

    fiber = Fiber(lambda: tokenizer(*args, **kwargs))
    state = fiber.start()
    while isinstance(state, HostCall):
        state = fiber.resume(state.run())
    assert isinstance(state, Returned), state
    return state.value


def test_an_engine_that_sleeps_goes_on_when_the_tokens_are_there() -> None:
    arguments = {**ARGUMENTS["flux"], "num_inference_steps": 2}
    with carpool.load(served("flux"), device="cpu") as engine:
        [output] = engine.generate(LONG, seed=1, **arguments)

    assert gap(output.images, solo("flux", LONG, seed=1, num_inference_steps=2)) < CLOSE


def test_a_truncated_prompt_is_told_to_its_request_and_its_log_line_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        with driving("sd15") as drive:
            long = drive.submit("a cat and a dog " * 30, request_id="req-long", **ARGUMENTS["sd15"])
            short = drive.submit("a cat", request_id="req-short", **ARGUMENTS["sd15"])
            drive.finish()
    finally:
        logger.removeHandler(caplog.handler)

    [told] = long.outcome.warnings
    assert "was truncated because" in told
    assert short.outcome.warnings == ()
    # a set: in a process that logs as a worker does, the record reaches caplog's handler twice
    [line] = {text for text in caplog.messages if "was truncated because" in text}
    assert line.startswith("request req-long: ")
