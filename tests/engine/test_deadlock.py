"""The watch for deadlocks: what it takes for one, and what it never does."""

import sys
from dataclasses import dataclass, field
from types import FrameType

import pytest

from carpool.engine.deadlock import BLOCKED_S, CLOSING_S, LOOK_S, MAX_SHARE, STILL_S, DeadlockWatch
from carpool.engine.thread_wait import ThreadWait
from support.engine_driver import VirtualClock

HERE: FrameType = sys._getframe()


@dataclass
class Engine:
    """An engine whose thread does what a test says, while the clock goes on."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    is_still: bool = True  # its loop makes no progress
    is_closing: bool = False
    has_company: bool = True
    are_busy: bool = False  # threads of the pipeline's own
    is_lock: bool = True
    cpu_share: float = 0.0
    moves: bool = False  # the thread is elsewhere at every look
    is_foreign: bool = True  # the code in which it stands
    ends: list[str] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)

    @property
    def still_s(self) -> float:
        return self.clock() if self.is_still else 0.0

    def wait(self) -> ThreadWait | None:
        if not self.is_foreign:
            return None
        cpu_s = self.clock() * self.cpu_share
        return ThreadWait(HERE, int(self.clock() * 10) * self.moves, self.is_lock, cpu_s)

    def are_others_at_work(self) -> bool:
        return self.are_busy

    def stands(self) -> None:
        self.answered_s.append(self.clock())

    def is_blocked(self, place: str) -> None:
        self.ends.append(place)

    def blocked_after_s(self, most_s: float = 3600.0) -> float | None:
        """When the watch has enough; None: it never has."""
        watch = DeadlockWatch(self, self.clock)  # type: ignore[arg-type]
        while self.clock() < most_s:
            self.clock.pass_by(LOOK_S)
            if watch.look():
                assert len(self.ends) == 1
                return self.clock()
        return None


def test_a_lock_that_keeps_the_thread_among_other_requests_is_a_deadlock_after_the_limit() -> None:
    blocked_s = Engine().blocked_after_s()

    assert blocked_s is not None
    assert STILL_S + BLOCKED_S <= blocked_s <= STILL_S + BLOCKED_S + 2 * LOOK_S


def test_locks_that_are_asked_for_again_and_again_are_one_wait() -> None:
    assert Engine(cpu_share=MAX_SHARE / 2).blocked_after_s() is not None


def test_an_hour_of_anything_else_is_none() -> None:
    assert Engine(is_still=False).blocked_after_s() is None  # the loop turns
    assert Engine(is_foreign=False).blocked_after_s() is None  # a forward, a compilation, a library
    assert Engine(is_lock=False).blocked_after_s() is None  # sleep, network, processes
    assert Engine(cpu_share=1.0).blocked_after_s() is None  # a call that computes
    assert Engine(moves=True).blocked_after_s() is None  # many short waits
    assert Engine(are_busy=True).blocked_after_s() is None  # it waits for threads of its own
    assert Engine(has_company=False).blocked_after_s() is None  # as plain diffusers would wait


def test_a_wait_counts_from_its_own_beginning() -> None:
    engine = Engine(is_lock=False)
    assert engine.blocked_after_s(50.0) is None

    engine.is_lock = True

    assert (engine.blocked_after_s() or 0.0) >= 50.0 + BLOCKED_S


@pytest.mark.parametrize("is_lock", [True, False])
def test_an_engine_that_is_to_end_leaves_a_sleeping_thread_and_waits_for_one_at_work(
    is_lock: bool,
) -> None:
    sleeping = Engine(is_closing=True, has_company=False, are_busy=True, is_lock=is_lock)
    working = Engine(is_closing=True, cpu_share=1.0, is_lock=is_lock)
    forward = Engine(is_closing=True, is_foreign=False)

    assert (sleeping.blocked_after_s() or 99.0) <= STILL_S + CLOSING_S + 2 * LOOK_S < 5.0
    assert working.blocked_after_s() is forward.blocked_after_s() is None


def test_requests_that_are_due_are_answered_while_the_thread_stands_in_code_of_users() -> None:
    sleeping, forward = Engine(is_lock=False), Engine(is_foreign=False)
    sleeping.blocked_after_s(20.0)
    forward.blocked_after_s(20.0)

    assert len(sleeping.answered_s) > 30
    assert not forward.answered_s
