"""What those who watch an engine are told of it."""

from carpool.engine.observe.activity import CAPACITY, ActivityLog
from carpool.engine.observe.timeline import Forward, Timeline
from carpool.schedule.overload import Speed
from support.engine_driver import driving
from support.tiny import ARGUMENTS


def forward(*numbers: int) -> Forward:
    timelines = tuple(Timeline("", 0.0, number) for number in numbers)
    return Forward(
        "transformer", "forward", "denoise", timelines, (1,) * len(timelines), 3.0, 0.5, 0, "cap"
    )


def test_nothing_is_kept_while_nobody_watches() -> None:
    log = ActivityLog()

    log.forward(forward(1))

    assert log.take() == ([], 0)


def test_a_forward_is_told_once_without_its_requests_and_the_oldest_of_too_many_are_counted() -> (
    None
):
    log = ActivityLog()
    log.is_on = True
    for _ in range(CAPACITY + 3):
        log.forward(forward(4, 7))

    taken, missed = log.take()

    assert (len(taken), missed) == (CAPACITY, 3)
    assert taken[0].requests == (4, 7)
    assert (taken[0].module, taken[0].why) == ("transformer.forward", "cap")
    assert log.take() == ([], 0)


def test_waiting_requests_start_as_places_become_free_in_the_order_of_the_queue() -> None:
    speed = Speed(stretch=2.0)

    assert speed.starts_s([3.0, 1.0], 1, [4.0, 1.0, 1.0]) == [0.0, 2.0, 4.0]
    assert speed.starts_s([], 0, [1.0]) == [0.0]
    assert speed.starts_s([1.0], 0, []) == []


def test_an_engine_tells_of_running_and_waiting_requests_and_every_shared_forward() -> None:
    log = ActivityLog()
    log.is_on = True
    small = ARGUMENTS["flux"] | {"width": 32, "height": 32}
    with driving("flux", max_running=2) as drive:
        drive.engine._observers.append(log.forward)
        for name in ("one", "two", "three"):
            drive.submit(request_id=name, **small | {"num_inference_steps": 3})
        before = drive.engine.requests()
        while not any(one.step for one in drive.engine.requests().running):
            drive.engine.step()
        during = drive.engine.requests()
        drive.finish()
        after = drive.engine.requests()

    seen, missed = log.take()
    assert [one.request_id for one in before.waiting] == ["one", "two", "three"]
    assert [(one.request_id, one.steps) for one in during.running] == [("one", 3), ("two", 3)]
    assert [one.request_id for one in during.waiting] == ["three"]
    assert during.waiting[0].starts_s is None or during.waiting[0].starts_s >= 0
    assert (after.running, after.waiting, after.waiting_count) == ((), (), 0)
    assert missed == 0
    assert [one.requests for one in seen if one.phase == "denoise"].count((1, 2)) == 3
    assert all(one.why for one in seen)
