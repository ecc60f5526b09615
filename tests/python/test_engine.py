"""The Python API: what goes in comes out in order, and can be followed, awaited and cancelled."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import carpool
from carpool import Request, errors
from carpool.config import load_settings
from carpool.engine.loop import EngineCore
from carpool.engine.model.load import load as load_pipeline
from carpool.engine.observe.timeline import Forward
from carpool.engine.request import Listener
from carpool.types import CheckedRequest
from support.engine_driver import InLine, gap, served
from support.tiny import ARGUMENTS

FLUX: dict[str, Any] = ARGUMENTS["flux"]
QUICK: dict[str, Any] = FLUX | {"width": 32, "height": 32, "num_inference_steps": 2}
ENDLESS: dict[str, Any] = QUICK | {"num_inference_steps": 900}


@pytest.fixture(scope="module")
def engine() -> Iterator[carpool.Engine]:
    with carpool.load(served("flux"), device="cpu", max_running=4) as engine:
        yield engine


def fail(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    raise ArithmeticError("a puncture")


def same(left: carpool.Output, right: carpool.Output) -> bool:
    return gap(left.images, right.images) < 2e-5


def test_outputs_come_in_the_order_of_the_requests(engine: carpool.Engine) -> None:
    prompts = ["a cat", "a dog", "the moon"]
    steps = [6, 1, 3]  # so that they end in another order

    together = engine.generate(
        [Request(prompt, num_inference_steps=n) for prompt, n in zip(prompts, steps, strict=True)],
        seed=7,
        **QUICK,
    )

    for prompt, n, output in zip(prompts, steps, together, strict=True):
        [alone] = engine.generate(prompt, seed=7, **QUICK | {"num_inference_steps": n})
        assert same(output, alone)
        assert output.seed == 7


def test_n_outputs_are_those_of_the_seeds_that_follow(engine: carpool.Engine) -> None:
    several = engine.generate(["a cat", "a dog"], n=3, seed=40, **QUICK)

    assert [output.seed for output in several] == [40, 41, 42, 40, 41, 42]
    assert len({output.request_id for output in several}) == 6
    for seed, output in zip((40, 41, 42), several[3:], strict=True):
        assert same(output, engine.submit("a dog", seed=seed, **QUICK).result(10))


def test_a_seed_is_drawn_and_told_for_who_brings_none(engine: carpool.Engine) -> None:
    first, second = engine.generate(["a cat"] * 2, **QUICK)

    assert first.seed != second.seed
    assert same(first, engine.generate("a cat", seed=first.seed, **QUICK)[0])


def test_pictures_are_pil_by_default_and_arrays_on_demand(engine: carpool.Engine) -> None:
    arguments = {name: value for name, value in QUICK.items() if name != "output_type"}

    pictures: list[Any] = [
        engine.submit("a cat", seed=1, **arguments, output_type=kind).result(10).images
        for kind in (None, "np", "pt", "latent")
    ]
    default, array, tensor, latent = pictures

    assert [image.size for image in default] == [(32, 32)]
    assert array.shape == (1, 32, 32, 3)
    assert tensor.shape == (1, 3, 32, 32)
    assert torch.allclose(torch.from_numpy(array[0]), tensor[0].permute(1, 2, 0))
    assert latent.ndim == 3


def test_what_a_request_says_itself_wins(engine: carpool.Engine) -> None:
    common: dict[str, Any] = {**QUICK, "seed": 1, "timeout_s": 3e38}  # more than threading waits
    own = Request("a cat", seed=2, num_inference_steps=4)

    given, other = engine.generate([own, "a cat"], **common)

    assert (given.seed, other.seed) == (2, 1)
    assert given.request_id == own.request_id
    expected = engine.submit("a cat", seed=2, **QUICK | {"num_inference_steps": 4}).result(10)
    assert same(given, expected)
    with pytest.raises(errors.DeadlineExceeded, match=r"timeout_s=0.001 ran out"):
        engine.generate(Request("a cat", timeout_s=0.001), **ENDLESS | {"timeout_s": 100})


def test_errors_are_returned_on_demand_in_their_places(engine: carpool.Engine) -> None:
    good, wrong = Request("a cat"), Request("a cat", guidance="strong")
    failing = Request("a cat", callback_on_step_end=fail)

    outputs = engine.generate([good, wrong, failing, good], return_errors=True, **QUICK)

    assert [type(output.error) for output in outputs] == [
        type(None), errors.UnknownParameter, errors.PipelineFailed, type(None),
    ]  # fmt: skip
    assert outputs[1].images is None
    assert outputs[2].request_id == failing.request_id


def test_the_first_failure_is_raised_after_the_others_have_finished(engine: carpool.Engine) -> None:
    before = engine.statistics()["steps"]
    failing = Request("a cat", callback_on_step_end=fail)

    with pytest.raises(errors.PipelineFailed, match="a puncture"):
        engine.generate([failing, Request("a cat", num_inference_steps=9)], **QUICK)

    statistics = engine.statistics()
    assert statistics["running"] == 0
    assert statistics["steps"] >= before + 9


def test_a_request_of_a_list_that_would_be_too_late_takes_no_other_with_it(
    engine: carpool.Engine,
) -> None:
    engine.generate(["a cat"] * 4, **QUICK)  # what steps take is known from now on
    late = Request("a cat", deadline_s=0.01, num_inference_steps=900)

    outputs = engine.generate(
        [Request("a cat"), late, Request("a dog")], return_errors=True, **QUICK
    )

    assert [type(output.error) for output in outputs] == [type(None), errors.TooLate, type(None)]
    with pytest.raises(errors.TooLate):
        engine.generate([late, Request("a dog")], **QUICK)


def test_a_progress_function_that_fails_ends_neither_its_request_nor_the_engine(
    engine: carpool.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    heard = list[int]()

    def progress(place: int, event: carpool.Event) -> None:
        heard.append(place)
        if place == 0:
            raise ZeroDivisionError("a puncture")

    outputs = engine.generate(["a cat", "a dog"], progress=progress, **QUICK)

    assert len(outputs) == 2
    assert (heard.count(0), heard.count(1) > 2) == (1, True)
    assert "a puncture" in caplog.text
    assert engine.generate("a cat", **QUICK)


def test_a_wrong_request_stops_its_list_before_anything_runs(engine: carpool.Engine) -> None:
    before = engine.statistics()["requests"]

    with pytest.raises(errors.InvalidValue, match="num_inference_steps=0"):
        engine.generate(["a cat", Request("a dog", num_inference_steps=0)], **QUICK)

    assert engine.statistics()["requests"] == before


@pytest.mark.parametrize(
    ("requests", "more", "says"),
    [
        ([], {}, "the list of prompts is empty: give at least one"),
        ("a cat", {"n": 0}, "n=0: must be a whole number from 1 to 1000"),
        ("a cat", {"steps": 3}, "has no parameter 'steps'"),
        ([5], {}, "a request is a prompt or a carpool.Request, not a int"),
    ],
)
def test_impossible_orders_are_refused(
    engine: carpool.Engine, requests: Any, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(errors.Rejected, match=says):
        engine.generate(requests, **more)


def test_events_tell_the_whole_story_in_order(engine: carpool.Engine) -> None:
    handle = engine.submit("a cat", **QUICK | {"num_inference_steps": 4})

    events = list(handle.events())

    assert [event.kind for event in events] == ["queued", "started", *["step"] * 4, "finished"]
    assert [(e.step, e.steps) for e in events[2:-1]] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert events[-1].error is None
    assert {event.request_id for event in events} == {handle.request_id}
    assert list(handle.events()) == events  # for a second reader as well


def test_previews_are_events_of_whoever_wants_them(engine: carpool.Engine) -> None:
    draw = QUICK | {"num_inference_steps": 8}

    watched, plain = (engine.submit("a cat", seed=3, partial_images=n, **draw) for n in (3, 0))

    shown = [event for event in watched.events() if event.kind == "preview"]
    assert [event.step for event in shown] == [2, 4, 6]
    assert {event.picture.shape for event in shown} == {(32, 32, 3)}
    assert not [event for event in plain.events() if event.kind == "preview"]
    assert same(watched.result(10), plain.result(10))
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(
            errors.InvalidValue, match=f"partial_images={wrong!r}: must be a whole number"
        ):
            engine.submit("a cat", partial_images=wrong, **draw)  # type: ignore[arg-type]


def test_latents_count_all_their_steps_too(engine: carpool.Engine) -> None:
    arguments = QUICK | {"num_inference_steps": 4, "output_type": "latent"}

    events = list(engine.submit("a cat", **arguments).events())

    assert events[-1].step == 4


def test_a_handle_cancels_what_it_stands_for(engine: carpool.Engine) -> None:
    handle, other = (engine.submit("a cat", **ENDLESS), engine.submit("a cat", **QUICK))
    assert next(event for event in handle.events() if event.kind == "step")

    handle.cancel()

    with pytest.raises(errors.Cancelled, match="the request was cancelled"):
        handle.result(10)
    assert isinstance(list(handle.events())[-1].error, errors.Cancelled)
    assert other.result(10).error is None


def test_waiting_for_a_result_may_time_out_while_the_request_goes_on(
    engine: carpool.Engine,
) -> None:
    handle = engine.submit("a cat", **ENDLESS)

    with pytest.raises(TimeoutError):
        handle.result(0.01)

    assert next(event for event in handle.events() if event.step == 2)
    handle.cancel()


async def test_handles_can_be_awaited(engine: carpool.Engine) -> None:
    handles = [engine.submit("a cat", seed=seed, **QUICK) for seed in range(2)]
    failing = engine.submit("a cat", callback_on_step_end=fail, **QUICK)
    with pytest.raises(errors.PipelineFailed):
        await failing
    outputs = [await handle for handle in handles]

    assert [output.seed for output in outputs] == [0, 1]


def test_giving_up_an_await_cancels_the_request(engine: carpool.Engine) -> None:
    async def impatient(handle: carpool.Handle) -> None:
        async with asyncio.timeout(0.01):
            await handle

    handle = engine.submit("a cat", **ENDLESS)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient(handle))

    with pytest.raises(errors.Cancelled):
        handle.result(10)
    assert list(handle.events())[-1].kind == "finished"


def test_a_list_longer_than_the_queue_is_no_overload() -> None:
    with carpool.load(served("flux"), device="cpu", max_running=2, max_queue=1) as engine:
        outputs = engine.generate(["a cat"] * 8, **QUICK)

        assert len(outputs) == 8
        running = [engine.submit("a cat", **ENDLESS) for _ in range(2)]
        for one in running:
            assert next(event for event in one.events() if event.kind == "step")
        engine.submit("a cat", **ENDLESS)
        with pytest.raises(errors.Overloaded):
            engine.submit("a cat", **QUICK)


class Hasty(EngineCore):
    """Its thread gets all the time it wants between two requests of a list."""

    has_run = threading.Event()

    def submit(
        self, request: CheckedRequest, listener: Listener, *more: Any, **others: Any
    ) -> None:
        super().submit(request, listener, *more, **others)
        self.has_run.wait(0.1)


def test_the_requests_of_one_list_start_together_on_an_idle_engine() -> None:
    chosen, forwards = load_settings({"device": "cpu"}), list[Forward]()
    core = Hasty(
        load_pipeline(served("flux"), chosen.engine()), chosen.engine(),
        observers=[forwards.append, lambda forward: Hasty.has_run.set()], policy=InLine(8),
    )  # fmt: skip
    with carpool.Engine(core, chosen) as engine:
        engine.generate(["a cat", "a dog", "the moon"], **QUICK)

    assert {forward.requests for forward in forwards} == {3}


def test_a_handle_has_the_verbs_of_a_future_and_says_how_far_it_is(engine: carpool.Engine) -> None:
    handle = engine.submit("a cat", seed=7, request_id="req-mine", **ENDLESS)

    assert not handle.done()
    assert next(event for event in handle if event.kind == "step").step == 1
    assert repr(handle).startswith("<carpool.Handle req-mine seed=7 step ")
    handle.cancel()
    with pytest.raises(errors.Cancelled):
        handle.result(60)
    assert handle.done()
    assert repr(handle) == "<carpool.Handle req-mine seed=7 failed: Cancelled>"


async def test_events_come_in_an_async_loop_too(engine: carpool.Engine) -> None:
    handle = engine.submit("a cat", **(QUICK | {"output_type": "pil"}))
    kinds: list[str] = [event.kind async for event in handle]
    again = [event.kind async for event in handle]
    assert kinds == again == [event.kind for event in handle]
    assert (await handle).images[0].size == (32, 32)
    assert repr(handle).endswith(" done>")
    assert kinds == ["queued", "started", "step", "step", "finished"]


def test_a_fork_is_told_that_it_has_no_engine(engine: carpool.Engine) -> None:
    handle = engine.submit("a cat", **ENDLESS)
    asks: list[Callable[[], object]] = [
        lambda: engine.generate("a dog", **QUICK), lambda: engine.submit("a dog", **QUICK),
        lambda: engine.jobs, engine.close, handle.result, handle.events, handle.cancel,
    ]  # fmt: skip
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # what hangs
        told = 0
        for ask in asks:
            try:
                ask()
            except errors.Forked as error:
                told += "without the engine's thread" in str(error)
        os._exit(told)
    _, status = os.waitpid(child, 0)
    handle.cancel()

    assert os.waitstatus_to_exitcode(status) == len(asks)
