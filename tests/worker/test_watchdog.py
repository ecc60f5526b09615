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

LONG_S, UNKNOWN_S = OVERRUN_FORWARDS * 60, UNKNOWN_TIMEOUTS * 10
MISSED_S = MISSED_HEARTBEATS * INTERVAL_S


@pytest.mark.parametrize(
    ("silent_s", "heartbeat", "timeout_s", "is_overdue"),
    [
        (10.0, None, 10.0, False),
        (10.1, None, 10.0, True),
        *(
            (silent_s, Heartbeat(0.0, expected_s), 10.0, silent_s > 10)
            for silent_s in (10.0, 10.1)
            for expected_s in (None, 0.0, 0.1, 1.9)  # no long forward is known
        ),
        (0.0, Heartbeat(9.9, 1.0), 10.0, False),  # it says that it stands still
        (0.0, Heartbeat(10.1, 1.0), 10.0, True),
        (0.0, Heartbeat(LONG_S - 1, 60.0), 10.0, False),  # a long forward
        (0.0, Heartbeat(LONG_S + 1, 60.0), 10.0, True),
        (LONG_S - 1, Heartbeat(0.0, 60.0), 10.0, False),  # in silence, too
        (LONG_S + 1, Heartbeat(0.0, 60.0), 10.0, True),
        (LONG_S - 50, Heartbeat(51.0, 60.0), 10.0, True),  # when last heard
        (0.0, Heartbeat(UNKNOWN_S - 1, None), 10.0, False),  # the first forward of a kind
        (0.0, Heartbeat(UNKNOWN_S + 1, None), 10.0, True),
        (MISSED_S, Heartbeat(0.0, 0.0), 0.5, False),  # heartbeats may be late
        (MISSED_S + 0.1, Heartbeat(0.0, 0.0), 0.5, True),
        (0.0, Heartbeat(0.6, 0.0), 0.5, True),  # it says so itself
    ],
    ids=str,
)
def test_silence_is_the_end_after_the_timeout_unless_a_forward_is_known_to_be_long(
    silent_s: float, heartbeat: Heartbeat | None, timeout_s: float, *, is_overdue: bool
) -> None:
    clock = VirtualClock()
    watchdog = Watchdog(timeout_s, clock)
    if heartbeat is not None:
        watchdog.receive(heartbeat)
    clock.pass_by(silent_s)

    assert watchdog.is_overdue is is_overdue


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
