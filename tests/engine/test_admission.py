"""A request that would come too late is refused once: by who gets it first."""

from collections.abc import Iterator

import pytest

from carpool.errors import TooLate
from carpool.request.parameters import check
from carpool.types import Request
from support.engine_driver import Drive, Recorder, VirtualClock, driving


@pytest.fixture(scope="module")
def drive() -> Iterator[Drive]:
    with driving("flux", clock=VirtualClock(0.001)) as drive:
        drive.submit(num_inference_steps=4)
        drive.finish()  # what steps take is known from now on
        yield drive


def put(drive: Drive, deadline_s: float, waited_s: float, *, is_admitted: bool = False) -> Recorder:
    request = Request("a", seed=1, deadline_s=deadline_s, num_inference_steps=4)
    checked, recorder = check(drive.engine.loaded.card, request), Recorder()
    drive.engine.submit(checked, recorder, waited_s, is_admitted=is_admitted)
    drive.finish()
    return recorder


@pytest.mark.parametrize("waited_s", [0.0, 1e-6, 0.5])
def test_a_request_that_would_be_too_late_is_refused_however_shortly_it_was_on_its_way(
    drive: Drive, waited_s: float
) -> None:
    with pytest.raises(TooLate, match=r"deadline_s=0\.001 cannot be met"):
        put(drive, 0.001, waited_s)


def test_the_time_that_a_request_waited_elsewhere_counts(drive: Drive) -> None:
    assert put(drive, 100.0, 1.0).error is None
    with pytest.raises(TooLate, match="it would take 10"):
        put(drive, 100.0, 99.999)


def test_a_request_that_was_accepted_before_is_run_however_late_it_will_be(drive: Drive) -> None:
    assert put(drive, 0.001, 99.0, is_admitted=True).error is None
