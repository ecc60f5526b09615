"""Code in a fiber stands still at `park`, and nothing of it leaks into the code around it."""

import contextlib
import contextvars
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import greenlet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.fiber import Fiber, Raised, Returned, in_fiber, park


def test_a_body_is_answered_where_it_parked() -> None:
    fiber = Fiber(lambda: (park("first"), park("second")))

    assert fiber.start() == "first"
    assert fiber.resume(1) == "second"
    assert fiber.resume(2) == Returned((1, 2))
    assert not fiber.is_alive


@pytest.mark.parametrize("answer", [None, (), (1, 2), {}, {"a": 1}, ((1,), {}), Returned(1)])
def test_any_answer_comes_through_unchanged(answer: Any) -> None:
    fiber = Fiber(lambda: park("call"))
    fiber.start()

    ended = fiber.resume(answer)

    assert ended == Returned(answer)
    assert ended.value is answer


@pytest.mark.parametrize("call", [None, (), (1, 2), {"a": 1}, Raised(ValueError())])
def test_any_call_comes_out_unchanged(call: Any) -> None:
    fiber = Fiber(lambda: park(call))

    assert fiber.start() is call
    fiber.close()


def test_a_body_that_never_parks_just_returns() -> None:
    assert Fiber(lambda: 5).start() == Returned(5)


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()]
)
def test_what_the_body_raises_is_given_not_raised_even_an_exit(error: BaseException) -> None:
    def body() -> None:
        raise error

    ended = Fiber(body).start()

    assert isinstance(ended, Raised)
    assert ended.error is error


def test_a_thrown_exception_may_be_caught_by_the_body() -> None:
    def body() -> Any:
        try:
            park("call")
        except ValueError as error:
            return park(str(error))

    fiber = Fiber(body)
    fiber.start()

    assert fiber.fail(ValueError("no answer")) == "no answer"
    assert fiber.resume("better") == Returned("better")


def test_a_thrown_exception_may_leave_the_body() -> None:
    fiber, error = Fiber(lambda: park("call")), ValueError("no answer")
    fiber.start()

    ended = fiber.fail(error)

    assert ended == Raised(error)
    assert not fiber.is_alive


def test_a_body_may_turn_what_was_thrown_into_something_else() -> None:
    def body() -> None:
        try:
            park("call")
        except ValueError as error:
            raise LookupError("worse") from error

    fiber, error = Fiber(body), ValueError("no answer")
    fiber.start()

    ended = fiber.fail(error)

    assert isinstance(ended.error, LookupError)
    assert ended.error.__cause__ is error


def test_parking_deep_in_a_call_stack_unwinds_nothing() -> None:
    def deep(depth: int) -> int:
        return park(depth) if depth == 0 else deep(depth - 1) + 1

    def numbers() -> Any:
        yield deep(30)
        yield from (park(i) for i in range(2))

    fiber = Fiber(lambda: sorted(numbers(), key=lambda n: -n))

    assert fiber.start() == 0
    assert fiber.resume(0) == 0
    assert fiber.resume(7) == 1
    assert fiber.resume(8) == Returned([30, 8, 7])


@given(st.lists(st.integers(0, 4), max_size=40))
def test_fibers_take_turns_in_any_order_without_mixing(turns: list[int]) -> None:
    def counts(which: int) -> Callable[[], list[Any]]:
        return lambda: [park((which, i)) for i in range(8)]

    fibers = [Fiber(counts(which)) for which in range(5)]
    states: list[Any] = [fiber.start() for fiber in fibers]
    for turn in turns:
        if fibers[turn].is_alive:
            states[turn] = fibers[turn].resume(states[turn])

    for which, (fiber, state) in enumerate(zip(fibers, states, strict=True)):
        while fiber.is_alive:
            state = fiber.resume(state)
        assert state == Returned([(which, i) for i in range(8)])


def test_context_variables_are_inherited_and_kept_apart() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("engine's")

    def body(name: str) -> Callable[[], list[str]]:
        def run() -> list[str]:
            seen = [variable.get()]
            variable.set(name)
            park("call")
            return [*seen, variable.get()]

        return run

    left, right = Fiber(body("left")), Fiber(body("right"))
    left.start(), right.start()

    assert variable.get() == "engine's"
    assert left.resume(None) == Returned(["engine's", "left"])
    assert right.resume(None) == Returned(["engine's", "right"])
    assert variable.get() == "engine's"


def test_exceptions_being_handled_are_kept_apart() -> None:
    def body(name: str) -> Callable[[], Any]:
        def run() -> Any:
            assert sys.exc_info() == (None, None, None)
            try:
                raise ValueError(name)
            except ValueError:
                park("handling")
                return sys.exc_info()[1]

        return run

    left, right = Fiber(body("left")), Fiber(body("right"))
    left.start(), right.start()

    assert sys.exc_info() == (None, None, None)
    assert str(left.resume(None).value) == "left"
    assert str(right.resume(None).value) == "right"


def test_code_knows_whether_it_is_in_a_fiber() -> None:
    assert not in_fiber()
    assert Fiber(in_fiber).start() == Returned(True)
    assert not in_fiber()


def test_the_greenlets_of_others_are_no_fibers() -> None:
    assert greenlet.greenlet(in_fiber).switch() is False


def test_grad_mode_stays_off_however_fibers_interleave() -> None:
    forwards: list[bool] = []

    @torch.no_grad()
    def pipeline(steps: int) -> None:
        for _ in range(steps):
            park("outside")
            with torch.no_grad():
                park("inside")
            with torch.set_grad_enabled(False):
                park("inside")

    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)  # as the engine does for its thread
    try:
        fibers = [Fiber(partial(pipeline, steps)) for steps in (1, 3, 2)]
        for fiber in fibers:
            fiber.start()
            forwards.append(torch.is_grad_enabled())
        while fibers := [fiber for fiber in fibers if fiber.is_alive]:
            for fiber in (fibers[0], fibers[-1], fibers[0]):
                if fiber.is_alive:
                    fiber.resume(None)
                forwards.append(torch.is_grad_enabled())
        cancelled = Fiber(partial(pipeline, 2))
        cancelled.start()
        cancelled.resume(None)
        cancelled.close()
        forwards.append(torch.is_grad_enabled())
    finally:
        torch.set_grad_enabled(before)

    assert not any(forwards)


def test_an_error_of_torch_walks_no_further_down_than_its_fiber() -> None:
    def fails() -> None:
        for _ in range(20):
            park(None)
            with contextlib.suppress(RuntimeError):
                torch.zeros(2) * torch.zeros(3)

    def from_a_depth(calls: int, switch: Callable[[], Any]) -> Any:
        if not calls:
            return switch()
        return next(map(from_a_depth, [calls - 1], [switch]))  # a call from C

    depths = random.Random(0)
    for _ in range(10):
        fibers = [Fiber(fails) for _ in range(6)]
        for fiber in fibers:
            from_a_depth(depths.randrange(12), fiber.start)
        while alive := [fiber for fiber in fibers if fiber.is_alive]:
            from_a_depth(depths.randrange(30), partial(depths.choice(alive).resume, None))
