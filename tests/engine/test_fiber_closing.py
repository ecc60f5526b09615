"""A fiber that nobody needs any more is unwound, whatever it catches or parks meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest

from carpool.engine.fiber import Fiber, FiberExit, park


def body_that(*, catches: type[BaseException], on_exit: Callable[[], Any]) -> Callable[[], Any]:
    def body() -> Any:
        try:
            return park("call")
        except catches:
            return on_exit()

    return body


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_finally_blocks_run_where_a_fiber_is_closed_or_forgotten(*, is_forgotten: bool) -> None:
    done: list[str] = []

    def body() -> None:
        try:
            park("call")
        finally:
            done.append("tidied")

    fiber = Fiber(body)
    fiber.start()

    if not is_forgotten:
        fiber.close()
        assert not fiber.is_alive
    del fiber

    assert done == ["tidied"]


def test_a_body_that_parks_while_it_is_closed_is_closed_all_the_same() -> None:
    parked: list[str] = []

    def tidy() -> None:
        try:
            park("tidy")
        finally:
            parked.append("in finally")
            park("once more")

    fiber = Fiber(body_that(catches=FiberExit, on_exit=tidy))
    fiber.start()

    fiber.close()

    assert parked == ["in finally"]
    assert not fiber.is_alive


def test_catching_every_exception_does_not_stop_an_exit() -> None:
    fiber = Fiber(body_that(catches=Exception, on_exit=lambda: park("again")))
    fiber.start()

    fiber.close()

    assert not fiber.is_alive


def test_a_body_that_never_ends_is_reported() -> None:
    def body() -> None:
        while True:
            try:
                park("again")
            except FiberExit:
                continue

    fiber = Fiber(body)
    fiber.start()

    with pytest.raises(RuntimeError, match="a fiber refuses to end"):
        fiber.close()


def test_fibers_that_never_started_or_have_ended_close_quietly() -> None:
    ran: list[int] = []
    unstarted, ended = Fiber(lambda: ran.append(1)), Fiber(lambda: ran.append(2))
    ended.start()

    for fiber in (unstarted, ended, ended):
        fiber.close()

    assert ran == [2]
