"""The heartbeat says how long the main loop has been busy, and how long it expected to be."""

from carpool.engine.observe.stats import LoopProgress
from support.engine_driver import VirtualClock


def test_it_tells_when_the_last_thing_began_and_the_seconds_expected_for_it() -> None:
    clock = VirtualClock()
    heartbeat = LoopProgress(clock)

    assert heartbeat.read() == (0.0, 0.0)
    heartbeat.beat(2.5)
    clock.pass_by(4.0)
    assert heartbeat.read() == (4.0, 2.5)
    heartbeat.beat(None)
    assert heartbeat.read() == (0.0, None)
    heartbeat.idle()
    clock.pass_by(4.0)
    assert heartbeat.read() == (0.0, 0.0)


def test_what_waits_for_the_device_may_take_as_long_as_the_forward_that_is_queued_there() -> None:
    heartbeat = LoopProgress(VirtualClock())

    heartbeat.launched(40.0)
    heartbeat.beat()  # a fiber
    assert heartbeat.read() == (0.0, 40.0)
    heartbeat.beat(0.5)  # a short forward
    assert heartbeat.read() == (0.0, 40.5)
    heartbeat.launched(0.5)
    heartbeat.beat()
    assert heartbeat.read() == (0.0, 0.5)
    heartbeat.launched(None)  # the first of its width
    heartbeat.beat()
    assert heartbeat.read() == (0.0, None)


def test_nothing_is_expected_of_a_compilation_and_the_rest_is_expected_after_it() -> None:
    clock = VirtualClock()
    heartbeat = LoopProgress(clock)

    heartbeat.beat(0.5)
    heartbeat.compiling()
    clock.pass_by(100.0)
    assert heartbeat.read() == (100.0, None)
    heartbeat.compiled()
    assert heartbeat.read() == (0.0, 0.5)
