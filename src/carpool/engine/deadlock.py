"""Deadlocks: a request waits for a lock of another request that is parked on the same thread.

Fibers share a thread, so a lock that a fiber holds while it is parked can stop all of them, and
with them the engine. A watchdog looks at the engine's thread while the loop makes no progress. It
distinguishes a deadlock from long work: the thread sleeps in a lock, at one line of user code,
while several requests have begun, and no other thread of that code is at work.
"""

import threading

from carpool.engine.thread_wait import THREAD_PREFIX, ThreadWait
from carpool.engine.watched_engine import WatchedEngine
from carpool.types import Clock

LOOK_S = 0.5  # between looks, which cost some 0.1 ms, only while the loop makes no progress
STILL_S = 1.0  # without progress before the first look: few turns of a loop take as long
BLOCKED_S = 10.0  # time in a lock. With 5, a wait for another thread's work counts as a deadlock;
# with 20, requests wait longer in vain, once for each model with a deadlock
CLOSING_S = 1.5  # asleep in user code, once the engine is closing. With 4, `close` takes
# more than 5 s; with half, it abandons threads that would have ended by themselves
MAX_SHARE = 0.02  # CPU share of a sleeping thread: some locks poll


class DeadlockWatch:
    """Watches an engine's thread from its own thread."""

    def __init__(self, engine: WatchedEngine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._last: tuple[ThreadWait, float] | None = None  # the last look and its time
        self._since_s = 0.0  # since when the thread has waited at its place
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the watchdog's thread. Call it from another thread."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_S)  # it ends at once unless a look is in progress

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            if self.look():
                return

    def look(self) -> bool:
        """Look once; returns whether the engine is stuck."""
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
        """Whether the thread has slept at one place since the last look."""
        if self._last is None:
            return False
        last, last_s = self._last
        is_asleep = wait.cpu_s - last.cpu_s <= MAX_SHARE * (now_s - last_s)
        return is_asleep and last.is_lock == wait.is_lock and wait.is_same(last)
