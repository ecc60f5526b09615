"""Limits of one API key: requests a minute, and requests and jobs open at once.

Rate: a token bucket for each key holds a minute's requests. Without keys all clients share one.
Open: requests without an answer, and unfinished jobs, which the store counts. A request that
becomes a job releases its slot first; the store then checks the limit under its write lock, so no
interleaving exceeds it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from carpool.errors import RateLimited
from carpool.types import Clock

BOUNDS_S = (0.1, 120.0)  # range of retry hints; SDKs ignore longer ones
JOBS_RETRY_S = 10.0  # retry hint when open jobs count


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
