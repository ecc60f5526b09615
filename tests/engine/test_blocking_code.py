"""Requests whose code waits for each other on one thread: answered in time, and `close` returns."""

import os
import random
import threading
import time
from collections.abc import Callable

import greenlet
import numpy as np
import pytest
import torch

import carpool
from carpool.engine import deadlock
from carpool.errors import CarpoolError, DeadlineExceeded, WorkerLost
from support import blocking
from support.engine_driver import driving
from support.isolation import differences, state_of
from support.odd_pipeline import Odd, drawn_alone, odd_pipeline

COMPANY = 4
CLOSED_S = 5.0  # within which an engine is closed, whatever its requests do


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LOOK_S": 0.05, "STILL_S": 0.1, "BLOCKED_S": 0.5}.items():
        monkeypatch.setattr(deadlock, name, seconds)


def outcomes(make: Callable[[], Odd], isolation: str, timeout_s: float | None) -> list[object]:
    """The picture, or the error, of each of several requests at once."""
    odd, seen, pipe = make(), list[object](), odd_pipeline()
    before, patched = state_of(pipe), torch.nn.Module.__setattr__
    with carpool.load(pipe, device="cpu", isolation=isolation) as engine:  # type: ignore[arg-type]
        requests = [
            engine.submit("x", seed=seed, odd=odd, output_type="pt", timeout_s=timeout_s)
            for seed in range(COMPANY)
        ]
        for request in requests:
            try:
                seen.append(request.result(30).images[0])
            except CarpoolError as error:
                seen.append(error)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < CLOSED_S
    assert torch.nn.Module.__setattr__ is patched
    changed = differences(before, state_of(pipe))  # a private ride that stands has its scheduler
    assert [name for name in changed if not name.startswith("scheduler.")] == []
    return seen


def is_plain(make: Callable[[], Odd], outcome: object, seed: int) -> bool:
    assert isinstance(outcome, torch.Tensor), outcome
    return torch.equal(outcome, drawn_alone(seed, make())[0])


@pytest.mark.parametrize("make", blocking.FREE)
def test_code_that_waits_for_no_other_request_gets_what_plain_diffusers_gives(
    make: Callable[[], Odd],
) -> None:
    for seed, outcome in enumerate(outcomes(make, "shared", None)):
        assert is_plain(make, outcome, seed)


@pytest.mark.parametrize("make", [*blocking.FREE, *blocking.WAITING, *blocking.FAILING])
def test_in_private_rides_nothing_waits_and_nothing_fails(make: Callable[[], Odd]) -> None:
    for seed, outcome in enumerate(outcomes(make, "private", None)):
        assert is_plain(make, outcome, seed)


@pytest.mark.parametrize("make", blocking.WAITING)
def test_a_deadlock_of_shared_requests_ends_each_in_its_time(make: Callable[[], Odd]) -> None:
    ended = outcomes(make, "shared", 3.0)

    for seed, outcome in enumerate(ended):
        if not isinstance(outcome, (WorkerLost, DeadlineExceeded)):
            assert is_plain(make, outcome, seed)


def when_all_are_there(odd: Odd) -> Odd:
    """Each request keeps calling until the last one has begun: none ends before others wait."""
    began = set[object]()

    def step(pipe: object, latents: object, timestep: object) -> object:
        began.add(greenlet.getcurrent())
        while len(began) < COMPANY:
            pipe.net(latents, timestep)  # type: ignore[attr-defined]
        return odd(pipe, latents, timestep)  # type: ignore[arg-type]

    return step


def test_a_deadlock_is_told_with_its_line_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    errors = outcomes(lambda: when_all_are_there(blocking.lock()), "shared", None)

    assert all(isinstance(error, WorkerLost) for error in errors)
    for text in ("blocking.py:", "in step: with lock", 'isolation="private"'):
        assert text in str(errors[0])
    assert sum("with lock" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("make", blocking.ENDLESS)
@pytest.mark.parametrize("isolation", ["shared", "private"])
def test_code_that_would_wait_alone_too_is_ended_by_its_time_limit(
    make: Callable[[], Odd], isolation: str
) -> None:
    for outcome in outcomes(make, isolation, 0.3):
        assert isinstance(outcome, (DeadlineExceeded, WorkerLost))


def test_an_engine_that_stands_still_takes_no_request_and_says_why() -> None:
    odd = when_all_are_there(blocking.lock())
    with carpool.load(odd_pipeline(), device="cpu", isolation="shared") as engine:
        lost = engine.generate(["x"] * COMPANY, odd=odd, return_errors=True)
        assert all(isinstance(output.error, WorkerLost) for output in lost)
        with pytest.raises(WorkerLost, match="is deadlocked"):
            engine.submit("x")


@pytest.mark.parametrize("isolation", ["shared", "private"])
def test_an_engine_closes_around_code_that_waits_which_changes_nothing_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    reading, writing = os.pipe()
    threads = list[threading.Thread]()

    def wait(*_: object) -> None:
        threads.append(threading.current_thread())
        os.read(reading, 1)

    numbers, bits = random.getstate(), np.random.get_bit_generator()  # type: ignore[attr-defined]
    engine = carpool.load(odd_pipeline(), device="cpu", isolation=isolation)  # type: ignore[arg-type]
    request = engine.submit("x", odd=wait)
    while not threads:
        time.sleep(0.01)
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < CLOSED_S
    with pytest.raises(CarpoolError, match="closed"):
        request.result(1)
    assert random.getstate() == numbers
    assert np.random.get_bit_generator() is bits  # type: ignore[attr-defined]

    monkeypatch.setenv("CARPOOL_TEST_SWITCH", "1")
    torch.manual_seed(7)
    os.write(writing, b"x")
    threads[0].join(30)
    assert not threads[0].is_alive()
    assert "CARPOOL_TEST_SWITCH" in os.environ
    assert torch.initial_seed() == 7
    for end in (reading, writing):
        os.close(end)


@pytest.mark.parametrize("make", blocking.FAILING)
def test_what_fails_only_among_others_runs_again_alone_and_then_always(
    make: Callable[[], Odd],
) -> None:
    odd = make()
    with driving(odd_pipeline(), isolation="shared") as drive:
        heard = [drive.submit("x", seed=seed, odd=odd, output_type="pt") for seed in range(4)]
        drive.finish()
        more = [drive.submit("x", seed=seed, odd=odd, output_type="pt") for seed in range(4)]
        drive.finish()

    for seed, recorder in enumerate([*heard, *more]):
        assert is_plain(make, recorder.image[0], seed % 4)
    warned = [recorder for recorder in heard if recorder.outcome.warnings]
    assert len(warned) == 3
    assert "ran alone: OddPipeline failed in company: RuntimeError" in str(
        warned[0].outcome.warnings
    )
    assert all("fails in company" in str(one.outcome.warnings) for one in more)


def test_what_fails_alone_too_runs_twice_only_the_first_time() -> None:
    runs = list[int]()

    def fail(pipe: object, latents: object, timestep: object) -> None:
        runs.append(1)
        raise RuntimeError("on purpose")

    with driving(odd_pipeline(), isolation="shared") as drive:
        for count in (3, 5):  # two runs of the first; and the other two, whose failure is known
            heard = [drive.submit("x", seed=seed, odd=fail) for seed in range(2)]
            other = drive.submit("x", seed=9, output_type="pt")
            drive.finish()
            assert len(runs) <= count + 1
            assert all("on purpose" in str(recorder.error) for recorder in heard)
            assert torch.equal(other.image, drawn_alone(9))
    with driving(odd_pipeline(), isolation="shared") as drive:
        runs.clear()
        drive.submit("x", odd=fail)
        drive.finish()
        assert len(runs) == 1  # nobody else was there
