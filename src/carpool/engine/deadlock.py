"""Deadlocks: a request waits for what another one holds, which shares its thread and is parked.

Fibers share a thread, so a lock that one of them takes in a forward's place and keeps while it is
parked stops all of them, and with them the engine. A watch looks at the engine's thread while the
loop makes no progress. It tells a deadlock from long work by evidence: the thread sleeps in a lock,
in one line of code that the libraries do not ship, while other requests have begun, and no other
thread of that code is at work.
"""

import threading
from typing import Protocol

from carpool.engine.thread_wait import THREAD_PREFIX, ThreadWait
from carpool.types import Clock

LOOK_S = 0.5  # between looks, which cost some 0.1 ms and only while the loop makes no progress
STILL_S = 1.0  # without progress before the first look: few turns of a loop take as long
BLOCKED_S = 10.0  # in a lock. With 5, code that waits for others' work is taken for a deadlock;
# with 20, requests wait so long for nothing, once for each model that has one
CLOSING_S = 1.5  # asleep in any code of users, once the engine is to end. With 4, `close` takes
# more than 5 s; with half, it leaves behind what would have ended by itself
MAX_SHARE = 0.02  # of a processor, up to which a thread sleeps: locks are also asked repeatedly


class Observed(Protocol):
    """An engine, as its watch sees it. From any thread."""

    @property
    def still_s(self) -> float:
        """Seconds since the loop last made progress; 0 while it is idle."""

    @property
    def is_closing(self) -> bool: ...

    @property
    def has_company(self) -> bool:
        """Whether more than one request has begun, and not ended."""

    def wait(self) -> ThreadWait | None:
        """How its thread stands in code of users."""

    def are_others_at_work(self) -> bool:
        """Whether a thread that such code may have started does something but wait."""

    def stands(self) -> None:
        """Its thread stands in code of users: requests that are due are answered elsewhere."""

    def is_blocked(self, place: str) -> None:
        """Its thread never goes on from that line, or not before the engine has to end."""


class DeadlockWatch:
    """Watches the thread of one engine, from a thread of its own."""

    def __init__(self, engine: Observed, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._last: tuple[ThreadWait, float] | None = None  # the last look, and when
        self._since_s = 0.0  # when the thread began to wait where it does
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. To be called from another one."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_S)  # it ends at once, but in the middle of a look

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            if self.look():
                return

    def look(self) -> bool:
        """Look once; returns whether there is no more to wait for."""
        engine, now_s = self._engine, self._clock()
        wait = engine.wait() if engine.still_s >= STILL_S else None
        if wait is None:
            self._last = None
            return False
        engine.stands()
        is_asleep, self._last = self._is_asleep(wait, now_s), (wait, now_s)
        if not is_asleep:
            self._since_s = now_s
            return False
        waited_s = now_s - self._since_s
        is_blocked = waited_s >= CLOSING_S if engine.is_closing else (
            wait.is_lock and waited_s >= BLOCKED_S
            and engine.has_company and not engine.are_others_at_work()
        )  # fmt: skip
        if is_blocked:
            self._last = None
            engine.is_blocked(wait.place)
        return is_blocked

    def _is_asleep(self, wait: ThreadWait, now_s: float) -> bool:
        """Whether the thread has slept in one place since the last look."""
        if self._last is None:
            return False
        last, last_s = self._last
        is_asleep = wait.cpu_s - last.cpu_s <= MAX_SHARE * (now_s - last_s)
        return is_asleep and last.is_lock == wait.is_lock and wait.is_same(last)
