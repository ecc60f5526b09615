"""A worker that hangs is told from one that is busy."""

import pytest

from carpool.worker.protocol import Heartbeat
from carpool.worker.watchdog import (
    INTERVAL_S,
    MISSED_HEARTBEATS,
    OVERRUN_FORWARDS,
    UNKNOWN_TIMEOUTS,
    Watchdog,
)
from support.engine_driver import VirtualClock


def is_overdue_after(seconds: float, heartbeat: Heartbeat | None, timeout_s: float = 10.0) -> bool:
    clock = VirtualClock()
    watchdog = Watchdog(timeout_s, clock)
    if heartbeat is not None:
        watchdog.receive(heartbeat)
    clock.pass_by(seconds)
    return watchdog.is_overdue


def test_silence_is_the_end_after_the_timeout() -> None:
    assert not is_overdue_after(10.0, None)
    assert is_overdue_after(10.1, None)
    assert not is_overdue_after(10.0, Heartbeat(0.0, 0.0))
    assert is_overdue_after(10.1, Heartbeat(0.0, 0.0))


def test_a_worker_that_says_it_stands_still_is_given_no_more_time_than_one_that_is_silent() -> None:
    assert not is_overdue_after(0.0, Heartbeat(9.9, 1.0))
    assert is_overdue_after(0.0, Heartbeat(10.1, 1.0))


def test_a_long_forward_has_its_time() -> None:
    assert not is_overdue_after(0.0, Heartbeat(OVERRUN_FORWARDS * 60 - 1, 60.0))
    assert is_overdue_after(0.0, Heartbeat(OVERRUN_FORWARDS * 60 + 1, 60.0))


def test_the_first_forward_of_a_kind_has_most_time() -> None:
    assert not is_overdue_after(0.0, Heartbeat(UNKNOWN_TIMEOUTS * 10 - 1, None))
    assert is_overdue_after(0.0, Heartbeat(UNKNOWN_TIMEOUTS * 10 + 1, None))


def test_a_long_forward_has_its_time_in_silence_too() -> None:
    assert not is_overdue_after(OVERRUN_FORWARDS * 60 - 1, Heartbeat(0.0, 60.0))
    assert is_overdue_after(OVERRUN_FORWARDS * 60 + 1, Heartbeat(0.0, 60.0))
    assert is_overdue_after(OVERRUN_FORWARDS * 60 - 50, Heartbeat(51.0, 60.0))  # when last heard


@pytest.mark.parametrize("expected_s", [None, 0.1, 1.9])
def test_a_worker_that_is_silent_has_the_timeout_where_no_long_forward_is_known(
    expected_s: float | None,
) -> None:
    assert not is_overdue_after(10.0, Heartbeat(0.0, expected_s))
    assert is_overdue_after(10.1, Heartbeat(0.0, expected_s))


def test_with_a_short_timeout_heartbeats_may_still_be_late() -> None:
    assert not is_overdue_after(MISSED_HEARTBEATS * INTERVAL_S, Heartbeat(0.0, 0.0), timeout_s=0.5)
    assert is_overdue_after(
        MISSED_HEARTBEATS * INTERVAL_S + 0.1, Heartbeat(0.0, 0.0), timeout_s=0.5
    )
    assert is_overdue_after(0.0, Heartbeat(0.6, 0.0), timeout_s=0.5)  # it says so itself


def test_it_takes_two_checks_as_the_front_may_have_stalled_itself() -> None:
    clock = VirtualClock()
    watchdog = Watchdog(10.0, clock)
    clock.pass_by(100.0)
    assert not watchdog.check()
    watchdog.receive(Heartbeat(0.0, 0.0))  # it had come long ago
    assert not watchdog.check()

    clock.pass_by(10.1)

    assert not watchdog.check()
    assert watchdog.check()


def test_every_heartbeat_starts_the_clock_again() -> None:
    clock = VirtualClock()
    watchdog = Watchdog(10.0, clock)
    for _ in range(20):
        clock.pass_by(9.0)
        assert not watchdog.is_overdue
        watchdog.receive(Heartbeat(0.0, 0.0))
