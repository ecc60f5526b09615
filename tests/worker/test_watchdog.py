"""A worker that hangs is told from one that is busy."""

import pytest

from carpool.worker.protocol import Beat
from carpool.worker.watchdog import EVERY_S, LONG_PAST, MISSED, UNKNOWN, Vigil
from support.engine_driver import VirtualClock


def is_over_after(seconds: float, beat: Beat | None, timeout_s: float = 10.0) -> bool:
    clock = VirtualClock()
    vigil = Vigil(timeout_s, clock)
    if beat is not None:
        vigil.heard(beat)
    clock.pass_by(seconds)
    return vigil.is_over


def test_silence_is_the_end_after_the_timeout() -> None:
    assert not is_over_after(10.0, None)
    assert is_over_after(10.1, None)
    assert not is_over_after(10.0, Beat(0.0, 0.0))
    assert is_over_after(10.1, Beat(0.0, 0.0))


def test_a_worker_that_says_it_stands_still_is_given_no_more_time_than_one_that_is_silent() -> None:
    assert not is_over_after(0.0, Beat(9.9, 1.0))
    assert is_over_after(0.0, Beat(10.1, 1.0))


def test_a_long_forward_has_its_time() -> None:
    assert not is_over_after(0.0, Beat(LONG_PAST * 60 - 1, 60.0))
    assert is_over_after(0.0, Beat(LONG_PAST * 60 + 1, 60.0))


def test_the_first_forward_of_a_kind_has_most_time() -> None:
    assert not is_over_after(0.0, Beat(UNKNOWN * 10 - 1, None))
    assert is_over_after(0.0, Beat(UNKNOWN * 10 + 1, None))


def test_a_long_forward_has_its_time_in_silence_too() -> None:
    assert not is_over_after(LONG_PAST * 60 - 1, Beat(0.0, 60.0))
    assert is_over_after(LONG_PAST * 60 + 1, Beat(0.0, 60.0))
    assert is_over_after(LONG_PAST * 60 - 50, Beat(51.0, 60.0))  # of it, when it was last heard


@pytest.mark.parametrize("expected_s", [None, 0.1, 1.9])
def test_a_worker_that_is_silent_has_the_timeout_where_no_long_forward_is_known(
    expected_s: float | None,
) -> None:
    assert not is_over_after(10.0, Beat(0.0, expected_s))
    assert is_over_after(10.1, Beat(0.0, expected_s))


def test_with_a_short_timeout_beats_may_still_be_late() -> None:
    assert not is_over_after(MISSED * EVERY_S, Beat(0.0, 0.0), timeout_s=0.5)
    assert is_over_after(MISSED * EVERY_S + 0.1, Beat(0.0, 0.0), timeout_s=0.5)
    assert is_over_after(0.0, Beat(0.6, 0.0), timeout_s=0.5)  # it says so itself


def test_it_takes_two_looks_as_the_front_may_have_stood_still_itself() -> None:
    clock = VirtualClock()
    vigil = Vigil(10.0, clock)
    clock.pass_by(100.0)
    assert not vigil.look()
    vigil.heard(Beat(0.0, 0.0))  # it had come long ago
    assert not vigil.look()

    clock.pass_by(10.1)

    assert not vigil.look()
    assert vigil.look()


def test_every_beat_begins_anew() -> None:
    clock = VirtualClock()
    vigil = Vigil(10.0, clock)
    for _ in range(20):
        clock.pass_by(9.0)
        assert not vigil.is_over
        vigil.heard(Beat(0.0, 0.0))
