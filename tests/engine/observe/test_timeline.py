"""A request's life: where its time went, with how many it rode, and what it waited for."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import carpool
from carpool.engine.loop import EngineCore
from carpool.engine.observe.timeline import MOST_OTHERS, Forward, Timeline, TimelineStore
from carpool.engine.observe.width_reason import differences, nearest, width_reason
from carpool.errors import Cancelled
from carpool.schedule.views import CallKind, Choice, ParkedCall
from support.engine_driver import Drive, Recorder, VirtualClock, driving, served
from support.tiny import ARGUMENTS

FLUX: dict[str, Any] = ARGUMENTS["flux"] | {"width": 32, "height": 32}
STEP_S = 2.0  # what every forward takes


def life(engine: EngineCore, request_id: str) -> dict[str, Any]:
    told = engine.timeline(request_id)
    assert told is not None
    return told


def phase(life: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [one for one in life["phases"] if one["phase"] == name]
    assert isinstance(found, dict)
    return found


def timed(drive: Drive, clock: VirtualClock) -> None:
    """Let every forward take `STEP_S`."""
    run: Callable[..., list[Any]] = drive.engine.runner.fuser.run

    def slow(calls: Sequence[Any], rows: Sequence[int]) -> list[Any]:
        clock.pass_by(STEP_S)
        return run(calls, rows)

    drive.engine.runner.fuser.run = slow  # type: ignore[method-assign]


def submit(drive: Drive, name: str, **parameters: Any) -> Recorder:
    return drive.submit(request_id=name, **{**FLUX, "num_inference_steps": 3, **parameters})


# In an engine


def test_a_life_has_its_phases_with_their_starts_durations_and_company() -> None:
    clock = VirtualClock()
    with driving("flux", clock=clock) as drive:
        timed(drive, clock)
        for name in ("one", "two", "three"):
            submit(drive, name)
        drive.finish()
        told = life(drive.engine, "two")

    assert (told["status"], told["error"]) == ("ok", None)
    assert (told["step"], told["steps"]) == (3, 3)
    assert [one["phase"] for one in told["phases"]] == ["encode", "denoise", "decode"]
    encode, denoise, decode = told["phases"]
    assert denoise["start_s"] == encode["start_s"] + encode["duration_s"] > 0
    assert decode["start_s"] == denoise["start_s"] + denoise["duration_s"]
    assert told["total_s"] == sum(one["duration_s"] for one in told["phases"])
    assert (denoise["forwards"], denoise["forward_s"]) == (3, 3 * STEP_S)
    assert (denoise["others_mean"], denoise["others_most"]) == (2.0, 2)
    assert denoise["shared_forwards"] == 3
    assert encode["shared_forwards"] <= encode["forwards"]
    assert denoise["others"] == ["one", "three"]
    assert denoise["waited_s"] == 0


def test_durations_are_spent_in_forwards_and_waits_and_nowhere_else() -> None:
    clock = VirtualClock()
    with driving("flux", clock=clock, max_batch_size=2) as drive:
        timed(drive, clock)
        heard = [submit(drive, str(n), num_inference_steps=2 + n) for n in range(3)]
        large = submit(drive, "large", width=64)
        drive.finish()
        timelines = [life(drive.engine, name) for name in ("0", "1", "2", "large")]

    assert all(one.error is None for one in [*heard, large])
    for one in (chapter for told in timelines for chapter in told["phases"]):
        assert one["duration_s"] == pytest.approx(one["forward_s"] + one["waited_s"])
        assert one["waited_s"] == pytest.approx(sum(one["waited_for_s"].values()))


def test_who_waits_in_the_line_is_known_and_what_it_waits_is_told() -> None:
    clock = VirtualClock()
    with driving("flux", clock=clock, max_running=1) as drive:
        submit(drive, "first")
        submit(drive, "second")
        drive.turn()
        clock.pass_by(7.0)
        running, waiting = life(drive.engine, "first"), life(drive.engine, "second")
        drive.finish()

    assert (running["status"], running["queued_s"]) == ("running", 0)
    assert sum(one["duration_s"] for one in running["phases"]) == 7.0
    assert (waiting["status"], waiting["queued_s"], waiting["phases"]) == ("queued", 7.0, [])


def test_failures_and_cancellations_are_told_by_their_code() -> None:
    def fail(calls: Sequence[Any], rows: Sequence[int]) -> list[Any]:
        raise ArithmeticError("a puncture")

    with driving("flux", max_running=1) as drive:
        for name in ("running", "waiting", "failing"):
            submit(drive, name)
        drive.turn(2)
        for name in ("running", "waiting"):
            drive.engine.cancel(name)
        drive.turn()
        drive.engine.runner.fuser.run = fail  # type: ignore[method-assign]
        drive.finish()
        told = {name: life(drive.engine, name) for name in ("running", "waiting", "failing")}

    assert [(one["status"], one["error"]) for one in told.values()] == [
        ("cancelled", "client_closed"),
        ("cancelled", "client_closed"),
        ("failed", "internal_error"),
    ]
    assert told["running"]["phases"] != []
    assert told["waiting"]["phases"] == []


def test_the_python_api_explains_a_request_and_says_none_of_unknown_ones() -> None:
    with carpool.load(served("flux"), device="cpu") as engine:
        [output] = engine.generate("a cat", **FLUX)
        told = engine.explain(output.request_id)
        unknown = engine.explain("req-0")

    assert unknown is None
    assert told is not None
    assert told["total_s"] == pytest.approx(output.timings.total_s)
    assert phase(told, "denoise")["duration_s"] == pytest.approx(output.timings.denoise_s)


# Alone


def forward(one: Timeline, began_s: float, ended_s: float) -> Forward:
    return Forward("", "forward", "denoise", (one,), (1,), began_s, ended_s - began_s)


def test_the_oldest_that_ended_are_forgotten_and_the_living_never() -> None:
    timelines = TimelineStore(capacity=2)
    living = timelines.begin("living", 0.0)
    for name in ("a", "b", "c"):
        one = timelines.begin(name, 0.0)
        timelines.end(one, None, 1.0)
        del one

    assert timelines.to_json("a", 2.0) is None
    assert [timelines.to_json(name, 2.0) is not None for name in ("b", "c", "living")] == [True] * 3
    assert living.status == "queued"


def test_moments_are_told_by_the_wall_clock_too() -> None:
    timelines = TimelineStore(wall_clock=lambda: 1_800_000_000.0)
    one = timelines.begin("one", 5.0)
    told = one.to_json(6.0)
    assert (told["submitted_at"], told["started_at"], told["ended_at"]) == (1.8e9, None, None)

    one.start(7.0)
    timelines.end(one, None, 9.5)

    told = one.to_json(20.0)
    assert (told["started_at"], told["ended_at"]) == (1.8e9 + 2, 1.8e9 + 4.5)


def test_the_others_of_a_phase_are_named_up_to_a_bound() -> None:
    timelines = TimelineStore()
    lives = [timelines.begin(f"{n}", 0.0) for n in range(100)]
    for life_ in lives:
        life_.start(0.0)
        timelines.parked(life_, "m", "k", 0.0)

    timelines.forward(Forward("", "forward", "denoise", tuple(lives), (1,) * 100, 0.0, 1.0))

    others = lives[1].to_json(2.0)["phases"][0]["others"]
    assert others == ["0", *(f"{n}" for n in range(2, MOST_OTHERS + 1))]


def test_an_id_that_comes_again_means_the_youngest() -> None:
    timelines = TimelineStore()
    old = timelines.begin("same", 0.0)
    timelines.end(old, Cancelled("no"), 1.0)
    young = timelines.begin("same", 5.0)

    told = timelines.to_json("same", 6.0)

    assert told is not None
    assert (told["status"], told["total_s"]) == ("queued", 1.0)
    assert young.error is None


def test_a_wait_is_told_apart_by_the_forwards_that_ran_meanwhile() -> None:
    timelines = TimelineStore()
    mine, same, other, decode = (timelines.begin(name, 0.0) for name in "abcd")
    for one, key in [(mine, "small"), (same, "small"), (other, "large"), (decode, "decode")]:
        one.start(0.0)
        timelines.parked(one, "vae" if one is decode else "transformer", key, 1.0)

    timelines.forward(forward(same, 1.0, 2.0))
    timelines.forward(forward(other, 2.0, 4.0))
    timelines.forward(forward(decode, 4.5, 8.5))
    timelines.forward(forward(mine, 8.5, 9.0))

    waited = mine.to_json(9.0)["phases"][0]["waited_for_s"]
    assert waited == {
        "place_in_forward": 1.0, "incompatible_forwards": 2.0, "other_modules": 4.0, "engine": 0.5
    }  # fmt: skip


# Why a forward was not wider


SMALL, LARGE = (torch.float32, "cpu", (16, 4)), (torch.float32, "cpu", (64, 4))
HALF = (torch.float16, "cpu", (16, 4))


def key(**parts: Any) -> Any:
    given = {"hidden_states": SMALL, "encoder_hidden_states": SMALL, **parts}
    return ("transformer", "forward", tuple(sorted(given.items())))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (key(hidden_states=LARGE), {"size"}), (key(encoder_hidden_states=LARGE), {"text length"}),
        (key(hidden_states=LARGE, encoder_hidden_states=LARGE), {"size", "text length"}),
        (key(hidden_states=HALF), {"dtype"}), (key(guidance=SMALL), {"guidance"}),
        (key(return_dict=(bool, True)), {"return_dict"}),
        (key(encoder_hidden_states=None), {"encoder_hidden_states"}), (object(), {"alone"}),
        ((key(), (("style", 1.0),)), {"adapters"}),
    ],
    ids=lambda value: " and ".join(sorted(value)) if isinstance(value, set) else "",
)  # fmt: skip
def test_what_keeps_two_calls_apart_has_a_word(other: Any, words: set[str]) -> None:
    mine = (key(), ()) if len(other if isinstance(other, tuple) else ()) == 2 else key()

    assert differences(mine, other) == differences(other, mine) == words


def test_the_nearest_call_is_the_one_that_differs_in_least() -> None:
    far = key(hidden_states=LARGE, encoder_hidden_states=LARGE, guidance=SMALL)

    assert nearest(key(), (far, key(guidance=SMALL))) == "guidance"
    assert nearest(key(), (far,)) == "size"


def parked(order: int, key: Any, name: str = "transformer.forward") -> ParkedCall:
    return ParkedCall(order, order, key, kind=CallKind(name, 1))


def test_a_forward_that_nobody_fits_into_says_why_of_the_nearest() -> None:
    leader, large = parked(1, key()), parked(2, key(hidden_states=LARGE))
    decode, same = parked(3, ("vae", "decode", ()), "vae.decode"), parked(4, key())
    alone = Choice((leader,), "nobody")

    assert width_reason(alone, [leader, decode]) == "differs:component"
    assert width_reason(alone, [leader, decode, large]) == "differs:size"
    assert width_reason(alone, [leader, decode, large, same]) == "group"


# Statistics over time


def test_statistics_tell_waits_and_the_pace_of_the_last_seconds() -> None:
    clock = VirtualClock()
    with driving("flux", clock=clock, max_running=1) as drive:
        timed(drive, clock)
        for n in range(3):
            submit(drive, str(n))
        before = drive.engine.statistics()
        drive.finish()
        took_s = clock.now_s
        after = drive.engine.statistics()
        clock.pass_by(100.0)
        idle = drive.engine.statistics()

    assert (before["steps_per_s"], before["waits"]["requests"]) == (0.0, 0)
    waits = after["waits"]
    assert waits["requests"] == 3
    assert waits["median_s"] == pytest.approx(took_s / 3)
    assert waits["p95_s"] == pytest.approx(took_s * 2 / 3)
    assert 0 < after["steps_per_s"] < 1 / STEP_S
    assert idle["steps_per_s"] == 0.0
    assert after["memory"]["weights_bytes"] > 100_000
