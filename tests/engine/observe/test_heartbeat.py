"""The heartbeat says how long the main loop has been busy, and how long it expected to be."""

from carpool.engine.observe.heartbeat import Heartbeat
from support.engine_driver import VirtualClock


def test_it_tells_when_the_last_thing_began_and_the_seconds_expected_for_it() -> None:
    clock = VirtualClock()
    heartbeat = Heartbeat(clock)

    assert heartbeat.read() == (0.0, 0.0)
    heartbeat.beat(2.5)
    clock.pass_by(4.0)
    assert heartbeat.read() == (4.0, 2.5)
    heartbeat.beat(None)
    assert heartbeat.read() == (0.0, None)
    heartbeat.idle()
    clock.pass_by(4.0)
    assert heartbeat.read() == (0.0, 0.0)
