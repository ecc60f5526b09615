"""A request ends when it is cancelled, too late or one too many, before its next forward."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from carpool.errors import Cancelled, DeadlineExceeded, Draining, Overloaded
from support import engine_driver
from support.tiny import ARGUMENTS

FLUX = ARGUMENTS["flux"]

Stage = Literal["queued", "encode", "denoise", "decode"]
STAGES: tuple[Stage, ...] = ("queued", "encode", "denoise", "decode")


class Trip:
    """Three requests; the one in the middle is brought to a stage, to be ended there."""

    def __init__(self, drive: engine_driver.Drive, stage: Stage, **victims: Any) -> None:
        self.drive, self.latents = drive, list[weakref.ref[Tensor]]()
        others = [{**FLUX, "seed": seed, "request_id": f"other-{seed}"} for seed in range(2)]
        victim = {**FLUX, "seed": 5, "request_id": "victim", **victims}
        victim["callback_on_step_end"] = self.watch
        arguments = [*others, victim] if stage == "queued" else [others[0], victim, others[1]]
        heard = {one["request_id"]: drive.submit("a cat", **one) for one in arguments}
        self.victim = heard.pop("victim")
        self.others = list(heard.values())
        self.drive.turn_until(self.stages()[stage])

    def watch(self, pipe: Any, step: int, t: Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        self.latents.append(weakref.ref(tensors["latents"]))
        return tensors

    def stages(self) -> dict[Stage, Callable[[], bool]]:
        return {
            "queued": lambda: self.others[0].step == 1,
            "encode": lambda: self.drive.widths("text_encoder") == [3],
            "denoise": lambda: self.victim.step == 1,
            "decode": lambda: self.victim.step == 3,
        }

    def is_over_at_once(self) -> bool:
        """One turn later the victim has heard its end, and was in no further forward."""
        before = len(self.drive.forwards)
        self.drive.turn()
        forwards = self.drive.forwards[before:]
        return self.victim.is_done and [forward.requests for forward in forwards] == [2]

    def has_left_nothing(self) -> bool:
        gc.collect()
        return all(latents() is None for latents in self.latents)

    def others_arrive(self) -> bool:
        self.drive.finish()
        alone = [engine_driver.solo("flux", "a cat", **FLUX, seed=seed) for seed in range(2)]
        return all(
            engine_driver.gap(o.image, a) < engine_driver.CLOSE
            for o, a in zip(self.others, alone, strict=True)
        )


def running(stage: Stage) -> int:
    return 2 if stage == "queued" else 32


@pytest.mark.parametrize("stage", STAGES)
def test_a_cancelled_request_ends_before_its_next_forward(stage: Stage) -> None:
    with engine_driver.driving("flux", isolation="shared", max_running=running(stage)) as drive:
        trip = Trip(drive, stage)

        drive.engine.cancel("victim")

        assert trip.is_over_at_once()
        assert trip.has_left_nothing()
        assert trip.others_arrive()
    assert isinstance(trip.victim.error, Cancelled)
    assert str(trip.victim.error) == "the request was cancelled"
    assert trip.victim.kinds.count("finished") == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_whose_time_is_up_ends_before_its_next_forward(stage: Stage) -> None:
    clock = engine_driver.VirtualClock()
    with engine_driver.driving(
        "flux", isolation="shared", clock=clock, max_running=running(stage)
    ) as drive:
        trip = Trip(drive, stage, timeout_s=5)
        clock.pass_by(4.9)
        drive.engine.running.end_cancelled()
        assert not trip.victim.is_done

        clock.pass_by(0.1)

        assert trip.is_over_at_once()
        assert trip.has_left_nothing()
        assert trip.others_arrive()
    steps = {"queued": 0, "encode": 0, "denoise": 1, "decode": 3}[stage]
    assert isinstance(trip.victim.error, DeadlineExceeded)
    assert str(trip.victim.error) == f"timeout_s=5.0 ran out after {steps} steps"
    assert trip.victim.outcome.timings.total_s == 5.0


def test_time_that_runs_out_during_a_forward_ends_the_request_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = engine_driver.VirtualClock()
    encoder = engine_driver.served("flux").text_encoder
    original = encoder.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        clock.pass_by(10)
        return original(*args, **kwargs)

    monkeypatch.setitem(encoder.__dict__, "forward", slow)
    with engine_driver.driving("flux", isolation="shared", clock=clock) as drive:
        late = drive.submit("a cat", **FLUX, timeout_s=5)
        drive.turn()

        assert isinstance(late.error, DeadlineExceeded)
        assert not drive.engine.step()


def test_no_forward_records_gradients_whoever_leaves_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformer, recorded = engine_driver.served("flux").transformer, list[bool]()
    original = transformer.forward

    @functools.wraps(original)
    def watched(**arguments: Any) -> Any:
        recorded.append(torch.is_grad_enabled())
        return original(**arguments)

    monkeypatch.setitem(transformer.__dict__, "forward", watched)
    with torch.enable_grad(), engine_driver.driving("flux", isolation="shared") as drive:
        for steps in (2, 4):
            drive.submit("a cat", **FLUX | {"num_inference_steps": steps})
        trip = Trip(drive, "denoise")
        drive.engine.cancel("victim")
        drive.finish()

    assert trip.victim.is_done
    assert len(recorded) >= 4
    assert not any(recorded)


def test_times_are_told_by_phase() -> None:
    clock = engine_driver.VirtualClock()
    with engine_driver.driving("flux", isolation="shared", clock=clock, max_running=1) as drive:
        heard = [drive.submit("a cat", **FLUX) for _ in range(2)]
        drive.engine.step()  # encodes the first
        clock.pass_by(1)
        drive.turn_until(lambda: drive.widths("text_encoder_2") == [1])
        clock.pass_by(2)
        drive.turn_until(lambda: heard[0].step == 3)
        clock.pass_by(4)
        drive.finish()

    timings = heard[0].outcome.timings
    assert (timings.queue_s, timings.encode_s, timings.denoise_s) == (0, 1, 2)
    assert (timings.decode_s, timings.total_s) == (4, 7)
    assert heard[1].outcome.timings.queue_s == heard[1].outcome.timings.total_s == 7


def test_a_finished_request_cannot_be_cancelled() -> None:
    with engine_driver.driving("flux", isolation="shared") as drive:
        heard = drive.submit("a cat", **FLUX, request_id="done")
        drive.finish()

        drive.engine.cancel("done")
        drive.engine.cancel("never heard of")
        drive.turn()

    assert heard.error is None
    assert heard.kinds == ["queued", "started", "step", "step", "step", "finished"]


def test_a_request_may_cancel_another_of_its_own_forward() -> None:
    with engine_driver.driving("flux", isolation="shared") as drive:

        def betray(pipe: Any, step: int, t: Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
            drive.engine.cancel("other")
            drive.engine.cancel("itself")
            return tensors

        heard = [
            drive.submit("a cat", **FLUX, callback_on_step_end=betray, request_id="itself"),
            drive.submit("a cat", **FLUX, request_id="other"),
        ]
        drive.finish()

    assert [type(one.error) for one in heard] == [Cancelled, Cancelled]
    assert drive.widths("transformer") == [2]


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    clock = engine_driver.VirtualClock()
    with engine_driver.driving(
        "flux", isolation="shared", clock=clock, max_running=2, max_queue=1
    ) as drive:
        heard = [drive.submit("a cat", **FLUX) for _ in range(3)]
        drive.turn()

        with pytest.raises(Overloaded) as refused:
            drive.submit("a cat", **FLUX)

        assert str(refused.value) == "the queue is full: 1 requests wait, the limit is 1"
        assert refused.value.status == 429
        assert refused.value.retry_after_s == 1.0
        drive.finish()
        assert [one.error for one in heard] == [None] * 3
        drive.submit("a cat", **FLUX)  # there is room again


def test_closing_ends_everything_and_gives_the_modules_back() -> None:
    pipe = engine_driver.fresh("flux")
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    before = {name: dict(module.__dict__) for name, module in modules.items()}

    with engine_driver.driving(pipe, max_running=2) as drive:
        heard = [drive.submit("a cat", **FLUX) for _ in range(3)]
        drive.turn(4)
        assert modules["transformer"].__dict__["_compiled_call_impl"]
        drive.engine.close()
        with pytest.raises(Draining, match="the engine is closing and takes no new requests"):
            drive.submit("a cat", **FLUX)

    for one in heard:
        assert isinstance(one.error, Cancelled)
        assert str(one.error) == "the engine was closed"
    for name, module in modules.items():
        after = dict(module.__dict__)
        after.pop("_diffusers_hook", None)  # flux' own `cache_context` leaves it
        assert after.keys() == before[name].keys()
        assert all(after[key] is before[name][key] for key in after if key != "training")
