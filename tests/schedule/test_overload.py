"""Overload: stages that follow what waits, do not flutter, and refuse the right requests."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import Overloaded
from carpool.request.parameters import check
from carpool.schedule.overload import LEAVE, Pressure, Speed, again_s, refuses, stage
from carpool.telemetry.metrics import Metrics
from carpool.types import Request
from support.engine_driver import Recorder, VirtualClock, driving

BUILD = {"version": "1", "torch": "2", "diffusers": "3", "revision": ""}
shares = st.floats(0, 3, allow_nan=False)
pressures = st.builds(Pressure, wait=shares, fill=shares)
stages = st.integers(0, 3)


@pytest.mark.parametrize(
    ("share", "rising", "falling"),
    [(0.0, 0, 0), (0.45, 0, 1), (0.5, 1, 1), (0.75, 1, 2), (0.8, 2, 2), (0.95, 2, 3), (1.0, 3, 3)],
)
def test_a_stage_is_left_later_than_it_is_entered(share: float, rising: int, falling: int) -> None:
    assert stage(0, Pressure(share, 0.0)) == rising
    assert stage(3, Pressure(share, 0.0)) == falling


def test_a_full_line_makes_the_last_stage_but_does_not_hold_it() -> None:
    assert stage(0, Pressure(0.0, 1.0)) == 3
    assert stage(3, Pressure(0.0, 0.95)) == 2


@given(stages, pressures, pressures)
def test_more_pressure_never_means_a_lower_stage(
    before: int, one: Pressure, other: Pressure
) -> None:
    most = Pressure(max(one.wait, other.wait), max(one.fill, other.fill))

    assert stage(before, most) >= stage(before, one)


@given(stages, pressures)
def test_the_same_pressure_again_changes_nothing(before: int, pressure: Pressure) -> None:
    after = stage(before, pressure)

    assert 0 <= after <= 3
    assert stage(after, pressure) == after


@given(stages, st.integers(-10, 10), st.integers(-10, 10))
def test_a_higher_priority_is_never_refused_before_a_lower_one(
    at: int, low: int, high: int
) -> None:
    low, high = sorted((low, high))

    assert refuses(at, low) >= refuses(at, high)
    assert refuses(min(at + 1, 3), low) >= refuses(at, low)


@given(st.sampled_from([2, 3]), st.floats(0, 1e6), st.floats(0.1, 1e5))
def test_who_comes_again_when_told_is_let_in(at: int, wait_s: float, most_s: float) -> None:
    hint_s = again_s(at, wait_s, most_s)

    assert 0.1 <= hint_s <= 120
    if hint_s < 120:  # what waits shrinks by a second a second
        left = max(0.0, wait_s - hint_s) / most_s
        assert left <= LEAVE[at - 1] + 1e-9


def test_the_speed_is_learned_from_forwards() -> None:
    speed = Speed()
    for _ in range(100):
        speed.learn(alone_s=8.0, calls=8, together_s=2.0)  # eight together take twice as long

    assert speed.wait_s(400.0) == pytest.approx(100.0, rel=0.01)
    assert speed.place_s([30.0, 10.0]) == pytest.approx(20.0, rel=0.01)
    assert speed.place_s([]) is None


# In the engine

FLUX: dict[str, Any] = {
    "num_inference_steps": 4, "width": 16, "height": 16, "max_sequence_length": 16,
}  # fmt: skip


def test_the_engine_refuses_in_stages_and_recovers() -> None:
    with driving(
        "flux", clock=VirtualClock(0.1), max_running=1, max_queue=100, max_wait=20.0
    ) as drive:
        drive.submit(**FLUX)
        drive.finish()  # what forwards take is known
        before = drive.engine.statistics()["overload"]
        assert before["stage"] == 0

        heard, refused = [], []
        for _ in range(100):
            try:
                heard.append(drive.submit(**FLUX))
            except Overloaded as error:
                refused.append(error)
                break

        assert drive.engine.scheduler.admission.stage == 3
        assert "overloaded" in str(refused[0])
        assert 0.1 <= (refused[0].retry_after_s or 0) <= 120
        statistics = drive.engine.statistics()
        assert statistics["overload"]["wait_s"] >= 20.0
        assert b'carpool_overload_stage{model="m"} 3.0' in Metrics().page("m", BUILD, statistics)
        drive.finish()
        assert [one.error for one in heard] == [None] * len(heard)  # those aboard are not shed
        assert drive.engine.scheduler.admission.stage == 0
        drive.submit(**FLUX)


def test_previews_stop_first() -> None:
    def previews(waiting: int) -> tuple[int, int]:
        with driving("flux", max_running=1, max_queue=10) as drive:
            job = check(drive.engine.loaded.card, Request("a cat", seed=0, **FLUX))
            watched = Recorder()
            drive.engine.submit(replace(job, previews=2), watched)
            drive.turn()
            for _ in range(waiting):
                drive.submit(**FLUX)
            drive.turn()
            stage = drive.engine.scheduler.admission.stage
            drive.turn_until(lambda: bool(watched.outcomes))
        assert watched.error is None
        return stage, sum(event.kind == "preview" for event in watched.events)

    assert previews(waiting=4) == (0, 2)
    assert previews(waiting=6) == (1, 0)


def test_low_priority_is_refused_while_others_are_taken() -> None:
    with driving(
        "flux", clock=VirtualClock(0.1), max_running=1, max_queue=10, max_wait=1e6
    ) as drive:
        for _ in range(9):
            drive.submit(**FLUX)

        with pytest.raises(Overloaded, match="none of priority below 0"):
            drive.submit(**FLUX, priority=-1)
        assert drive.engine.scheduler.admission.stage == 2
        drive.submit(**FLUX, priority=0)


def test_a_full_queue_says_when_a_place_is_likely_to_be_free() -> None:
    with driving(
        "flux", clock=VirtualClock(0.1), max_running=1, max_queue=0, max_wait=1e6
    ) as drive:
        drive.submit(**FLUX)
        drive.finish()
        drive.submit(**FLUX | {"num_inference_steps": 1000})
        drive.turn(5)

        with pytest.raises(Overloaded, match="the queue is full") as refused:
            drive.submit(**FLUX)

    assert 50 < (refused.value.retry_after_s or 0) <= 120  # some 0.1 s a step and more
