"""The loop's pulse: how long it has been busy, and with how long a thing."""

from carpool.engine.observe.heartbeat import Pulse
from support.engine_driver import VirtualClock


def test_it_says_how_long_ago_the_last_thing_began_and_what_it_was_to_take() -> None:
    clock = VirtualClock()
    pulse = Pulse(clock)

    assert pulse.read() == (0.0, 0.0)
    pulse.beat(2.5)
    clock.pass_by(4.0)
    assert pulse.read() == (4.0, 2.5)
    pulse.beat(None)
    assert pulse.read() == (0.0, None)
    pulse.rest()
    clock.pass_by(4.0)
    assert pulse.read() == (0.0, 0.0)
