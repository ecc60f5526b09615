"""Thread pools shared fairly between tenants (round robin).

asyncio's default executor serves all work of a server in order of arrival: one client with slow
pictures would occupy all threads. Here each kind of work has its own pool, and no tenant may occupy
all threads of a pool.
"""

import asyncio
import contextlib
import contextvars
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class FairSemaphore:
    """A semaphore with round-robin turns for tenants. Not thread-safe: one event loop."""

    def __init__(self, slots: int, *, per_tenant: int, budget: int | None = None) -> None:
        """Make a semaphore with all slots free.

        Args:
            per_tenant: slots that one tenant may have at once.
            budget: limit for the total cost of all holders; a holder alone may cost
                more.
        """
        self._free, self._per_tenant, self._budget = slots, per_tenant, budget
        self._held: Counter[str] = Counter()  # slots by tenant
        self._cost = 0  # total cost of all holders
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # in order of turns

    async def acquire(self, tenant: str, cost: int = 0) -> None:
        """Wait for a slot. A cancelled caller gets none."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, cost))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._grant()  # other tenants may have waited behind it
            else:
                self.release(tenant, cost)
            raise

    def release(self, tenant: str, cost: int = 0) -> None:
        """Give a slot back."""
        self._free += 1
        self._cost -= cost
        self._held[tenant] -= 1
        self._held += Counter()  # drops entries of 0
        self._grant()

    def _grant(self) -> None:
        while self._free and (tenant := self._next()) is not None:
            queue = self._waiting.pop(tenant)
            turn, cost = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # back of the round
            self._free -= 1
            self._cost += cost
            self._held[tenant] += 1
            turn.set_result(None)

    def _next(self) -> str | None:
        """The next tenant; a tenant that waits for the budget is not overtaken."""
        for tenant, queue in list(self._waiting.items()):
            while queue and queue[0][0].cancelled():
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
            elif self._held[tenant] < self._per_tenant:
                fits = self._budget is None or self._cost + queue[0][1] <= self._budget
                return tenant if fits or not self._cost else None
        return None


class FairExecutor:
    """A thread pool with round-robin turns for tenants. Cancelled queued work never runs."""

    def __init__(
        self, name: str, workers: int, *, per_tenant: int, budget: int | None = None,
        rests: bool = False,
    ) -> None:  # fmt: skip
        """Make a pool; threads start with the first work.

        Args:
            name: prefix of the threads' names.
            per_tenant, budget: see `FairSemaphore`.
            rests: a tenant rests as long as it worked before its next turn: for work that holds
                the GIL, so half of the time stays free.
        """
        self._rests = rests
        self._rested_s: dict[str, float] = {}  # end of each tenant's rest; event loop's clock
        self._slots = FairSemaphore(workers, per_tenant=per_tenant, budget=budget)
        self._threads = ThreadPoolExecutor(workers, name)

    async def run(self, tenant: str, work: Callable[[], T], *, cost: int = 0) -> T:
        """Run blocking work on a thread at this tenant's turn.

        Started work runs to its end and keeps its thread, even if its caller is cancelled.

        Args:
            cost: counts against the budget, for example bytes of memory.
        """
        await self._slots.acquire(tenant, cost)
        loop = asyncio.get_running_loop()
        if (rest_s := self._rested_s.pop(tenant, 0) - loop.time()) > 0:
            try:
                await asyncio.sleep(rest_s)
            except asyncio.CancelledError:
                self._rested_s[tenant] = loop.time() + rest_s
                self._slots.release(tenant, cost)
                raise
        began_s = loop.time()
        future = self._threads.submit(contextvars.copy_context().run, work)

        def release() -> None:
            if self._rests:
                self._rested_s[tenant] = 2 * loop.time() - began_s
            self._slots.release(tenant, cost)

        def ended(_: "Future[T]") -> None:
            with contextlib.suppress(RuntimeError):  # the event loop ended before the work
                loop.call_soon_threadsafe(release)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)


async def run_apart(
    executor: FairExecutor, tenant: str, work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """Run a coroutine on an event loop of its own, in a thread: it can block only that loop.

    It runs at this tenant's turn, and is cancelled with its caller.
    """
    is_given_up, stop = False, None

    async def run() -> T:
        nonlocal stop
        task = asyncio.current_task()
        assert task is not None
        stop = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if is_given_up:
            raise asyncio.CancelledError
        return await work()

    try:
        return await executor.run(tenant, lambda: asyncio.run(run()))
    except asyncio.CancelledError:
        is_given_up = True
        if stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has stopped
                stop()
        raise


def on_this_loop(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Awaitable[T]]:
    """Wrap a function for callers on other loops: it still runs on the current loop."""
    loop = asyncio.get_running_loop()

    @wraps(call)
    async def called(*args: P.args, **options: P.kwargs) -> T:
        future = asyncio.run_coroutine_threadsafe(call(*args, **options), loop)
        return await asyncio.wrap_future(future)

    return called
