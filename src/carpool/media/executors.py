"""Thread pools that are shared fairly between tenants (round robin).

asyncio's default executor is first come, first served, for all that a server does: one client with
slow pictures would hold all of its threads. Here each kind of work has a pool of its own, and one
tenant never has all threads of it.
"""

import asyncio
import contextlib
import contextvars
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class FairSemaphore:
    """A semaphore whose slots tenants take in turn. On one event loop."""

    def __init__(self, slots: int, *, per_tenant: int, budget: int | None = None) -> None:
        """Make a semaphore with all slots free.

        Args:
            per_tenant: slots that one tenant may have at once.
            budget: the most that the costs of all holders may add up to; a single holder may
                cost more.
        """
        self._free, self._per_tenant, self._budget = slots, per_tenant, budget
        self._held: Counter[str] = Counter()  # slots by tenant
        self._cost = 0  # total cost of all holders
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # in turn

    @asynccontextmanager
    async def hold(self, tenant: str, cost: int = 0) -> AsyncIterator[None]:
        """Hold a slot for the block."""
        await self.acquire(tenant, cost)
        try:
            yield
        finally:
            self.release(tenant, cost)

    async def acquire(self, tenant: str, cost: int = 0) -> None:
        """Wait for a slot. A caller that is cancelled gets none."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, cost))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._grant()  # the others may have waited for this one
            else:
                self.release(tenant, cost)
            raise

    def release(self, tenant: str, cost: int = 0) -> None:
        """Give a slot back."""
        self._free += 1
        self._cost -= cost
        self._held[tenant] -= 1
        self._held += Counter()  # keeps those above 0
        self._grant()

    def _grant(self) -> None:
        while self._free and (tenant := self._next()) is not None:
            queue = self._waiting.pop(tenant)
            turn, cost = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind all others
            self._free -= 1
            self._cost += cost
            self._held[tenant] += 1
            turn.set_result(None)

    def _next(self) -> str | None:
        """The tenant whose turn it is; one that costs too much now is not overtaken."""
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
    """A thread pool that tenants use in turn. Work that is cancelled before its turn never runs."""

    def __init__(
        self, name: str, workers: int, *, per_tenant: int, budget: int | None = None,
        rests: bool = False,
    ) -> None:  # fmt: skip
        """Make a pool; threads start with the first work.

        Args:
            name: of the threads.
            per_tenant, budget: see `FairSemaphore`.
            rests: a tenant that worked waits as long before its next turn: for work that holds
                the interpreter lock, which leaves half of the time to others.
        """
        self._rests = rests
        self._rested_s: dict[str, float] = {}  # end of each tenant's rest; event loop's clock
        self._slots = FairSemaphore(workers, per_tenant=per_tenant, budget=budget)
        self._threads = ThreadPoolExecutor(workers, name)

    async def run(self, tenant: str, work: Callable[[], T], *, cost: int = 0) -> T:
        """Run blocking work on a thread, when it is this tenant's turn.

        Work that has begun runs to its end and keeps its thread, though its caller is cancelled.

        Args:
            cost: counts against the budget; bytes of memory, say.
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
            with contextlib.suppress(RuntimeError):  # the event loop has ended before the work
                loop.call_soon_threadsafe(release)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)
