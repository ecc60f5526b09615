"""The state machine of a request, and what it holds in which state."""

from support.engine_driver import driving
from support.tiny import ARGUMENTS


def test_a_request_is_queued_then_running_then_finished_and_keeps_nothing() -> None:
    with driving("flux", max_running=1) as drive:
        first, second = (drive.submit(**ARGUMENTS["flux"]) for _ in range(2))
        _, queued = drive.engine._queue.snapshot()
        assert queued is not None
        one, two = queued
        assert (one.status, two.status) == ("queued", "queued")

        drive.turn()
        assert (one.status, two.status) == ("running", "queued")
        assert one.is_parked
        assert one.rows == 1

        drive.finish()

    assert (one.status, two.status) == ("finished", "finished")
    assert (first.error, second.error) == (None, None)
    assert (one.fiber, one.view, one.parked, one.is_parked) == (None, None, None, False)
    assert not hasattr(one, "call")  # nor its tensors


def test_a_parked_call_is_let_go_before_the_pipeline_goes_on() -> None:
    with driving("flux") as drive:
        drive.submit(**ARGUMENTS["flux"])
        drive.turn(2)
        [state] = drive.engine.running.parked
        before = state.call
        drive.turn()

        assert state.call is not before
        drive.finish()


def test_an_observer_gets_one_record_a_forward() -> None:
    with driving("flux") as drive:
        for _ in range(2):
            drive.submit(**ARGUMENTS["flux"])
        drive.finish()
        counted = drive.engine.statistics()["forwards"]

    assert sum(one["count"] for one in counted) == len(drive.forwards)
    assert {forward.requests for forward in drive.forwards} == {2}
    assert all(len(f.row_counts) == f.requests for f in drive.forwards)
