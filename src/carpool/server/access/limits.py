"""Limits of one API key: requests a minute, requests and jobs open at once, bytes in memory.

Rate: a token bucket for each key holds a minute's requests. Without keys all clients share one.
Open: requests without an answer, and unfinished jobs, which the store counts. A request that
becomes a job releases its slot first; the store then checks the limit under its write lock, so no
interleaving exceeds it.
Memory: bodies and pictures of open requests have a total, and a share per API key. Bytes count as
they arrive: a large Content-Length alone takes nothing from the budget.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.types import Message, Receive

from carpool.errors import BodyTooLarge, Overloaded, RateLimited
from carpool.types import Clock

BOUNDS_S = (0.1, 120.0)  # range of retry hints; SDKs ignore longer ones
JOBS_RETRY_S = 10.0  # retry hint when open jobs count
MEMORY_RETRY_S = 1.0
_FLAG = "--max-in-flight-bytes"


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float
    in_flight: int = 0
    mean_s: float = 1.0  # moving mean of its requests' duration


class Permit:
    """The slot of one admitted request."""

    def __init__(self, name: str, bucket: _Bucket, limit: int | None) -> None:
        self._name, self._bucket, self._is_released = name, bucket, False
        self.most = limit  # open at once; None: any number

    def release(self) -> bool:
        """Release the slot; returns whether it was held."""
        was_held, self._is_released = not self._is_released, True
        self._bucket.in_flight -= was_held
        return was_held

    def check(self, jobs: int) -> None:
        """Check the request against the open work of its key. Thread-safe.

        Args:
            jobs: open jobs of its key.

        Raises:
            RateLimited: the key is at its limit.
        """
        company = self._bucket.in_flight - (not self._is_released)
        if self.most is not None and company + jobs >= self.most:
            raise RateLimited(
                f"{company} other requests of {self._name} are unanswered and {jobs} jobs are "
                f"open: the limit for both together is {self.most} (--max-in-flight-per-key)",
                retry_after_s=JOBS_RETRY_S,
            )


class RateLimiter:
    """The limits of every key. Not thread-safe: one event loop."""

    def __init__(
        self, requests_per_minute: int | None, max_in_flight: int | None, clock: Clock
    ) -> None:
        self._per_minute, self._limit, self._clock = requests_per_minute, max_in_flight, clock
        self._buckets: dict[str, _Bucket] = {}  # one for each key

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[Permit]:
        """Admit a request; it counts until the block ends or its slot is released.

        Jobs are not counted here: a retried job must be found first, see `Permit.check`.

        Raises:
            RateLimited: the key is at its limit; `retry_after_s` says when to try again.
        """
        name = f"API key {key!r}" if key else "all clients together"
        began_s = self._clock()
        bucket = self._enter(key, name, began_s)
        slot = Permit(name, bucket, self._limit)
        try:
            yield slot
        finally:
            if slot.release():
                bucket.mean_s += 0.2 * (self._clock() - began_s - bucket.mean_s)

    def _enter(self, key: str, name: str, now_s: float) -> _Bucket:
        size = float(self._per_minute or 0)
        bucket = self._buckets.setdefault(key, _Bucket(size, now_s))
        bucket.tokens = min(size, bucket.tokens + (now_s - bucket.filled_s) * size / 60)
        bucket.filled_s = now_s
        if self._limit is not None and bucket.in_flight >= self._limit:
            raise RateLimited(
                f"{bucket.in_flight} requests of {name} are unanswered: the limit is "
                f"{self._limit} (--max-in-flight-per-key)",
                retry_after_s=_bounded(bucket.mean_s / bucket.in_flight),
            )
        if self._per_minute is not None:
            if bucket.tokens < 1 - 1e-9:  # rounding may leave slightly less than 1
                raise RateLimited(
                    f"{name}: the limit of {self._per_minute} requests a minute "
                    "(--requests-per-minute) is used up",
                    retry_after_s=_bounded((1 - bucket.tokens) * 60 / size),
                )
            bucket.tokens -= 1
        bucket.in_flight += 1
        return bucket


def _bounded(seconds: float) -> float:
    low, high = BOUNDS_S
    return min(max(seconds, low), high)


class MemoryLease:
    """The bytes that one request holds."""

    def __init__(self, budget: "MemoryBudget", key: str) -> None:
        self._budget, self._key, self.bytes = budget, key, 0

    def take(self, size: int) -> None:
        """Count more bytes.

        Raises:
            BodyTooLarge: above the limit of a single request.
            RateLimited: above the share of the key, with its other requests.
            Overloaded: above the total, with all other requests.
        """
        self._budget.check(self._key, self.bytes, size)
        self.give(-size)

    def give(self, size: int) -> None:
        """Return bytes that are no longer held."""
        self.bytes -= size
        self._budget.by_key[self._key] -= size

    def replace(self, old: int, new: int) -> None:
        """Take `new` bytes and return `old` ones; raises as `take`."""
        self.give(old)
        self.take(new)

    def metered(self, receive: Receive) -> Receive:
        """Wrap `receive` to count the bytes of the body."""

        async def metered() -> Message:
            message = await receive()
            self.take(len(message.get("body", b"")))
            return message

        return metered


class MemoryBudget:
    """The bytes that all requests hold. Not thread-safe: one event loop."""

    def __init__(self, limit: int, alone: int = 0) -> None:
        """Make an unused budget.

        Args:
            limit: total bytes; one key may hold half of them.
            alone: bytes that a key's or the server's only request may hold, if more.
        """
        self._limit, self._alone = limit, alone
        self.by_key: Counter[str] = Counter()

    @contextmanager
    def open(self, key: str) -> Iterator[MemoryLease]:
        """Open a lease for a request of this key; the block's end releases it."""
        lease = MemoryLease(self, key)
        try:
            yield lease
        finally:
            lease.give(lease.bytes)

    def check(self, key: str, own_bytes: int, size: int) -> None:
        """Refuse `size` more bytes for a request that holds `own_bytes`."""
        share = self._limit // 2 if key else self._limit
        if own_bytes + size > max(share, self._alone):
            problem = f"body and pictures of this request take more than {share} bytes ({_FLAG})"
            raise BodyTooLarge(f"{problem}: send fewer or smaller pictures, or a smaller n")
        other_bytes = self.by_key[key] - own_bytes
        if key and other_bytes and other_bytes + own_bytes + size > share:
            use = (
                f"bodies and pictures of other requests of API key {key!r} hold {other_bytes} bytes"
            )
            problem = f"{use}: with this one it would be more than {share} ({_FLAG})"
            raise RateLimited(problem, retry_after_s=MEMORY_RETRY_S)
        other_bytes = self.by_key.total() - own_bytes
        if other_bytes and other_bytes + own_bytes + size > self._limit:
            use = f"bodies and pictures of other requests hold {other_bytes} bytes"
            problem = f"{use}: with this one it would be more than {self._limit} ({_FLAG})"
            raise Overloaded(problem, retry_after_s=MEMORY_RETRY_S)
