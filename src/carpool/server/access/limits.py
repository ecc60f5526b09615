"""Limits of one API key: requests a minute, and requests and jobs open at once.

Rate: a token bucket for each key holds a minute's requests. Without keys all clients share one.
Open are requests without an answer and jobs that have not ended, which the store counts. A request
that becomes a job releases its slot first, and the store checks it against the others while it
alone writes, so that no order of events lets one too many in.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from carpool.errors import RateLimited
from carpool.types import Clock

BOUNDS_S = (0.1, 120.0)  # least and most retry hints; SDKs ignore longer ones
JOBS_RETRY_S = 10.0  # the hint where jobs are among what is open


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float
    in_flight: int = 0
    mean_s: float = 1.0  # moving mean of how long its requests take


class Permit:
    """The place of one admitted request among those of its key."""

    def __init__(self, name: str, bucket: _Bucket, limit: int | None) -> None:
        self._name, self._bucket, self._is_released = name, bucket, False
        self.most = limit  # open at once; None: any number

    def release(self) -> bool:
        """Release the slot; returns whether it was held."""
        was_held, self._is_released = not self._is_released, True
        self._bucket.in_flight -= was_held
        return was_held

    def check(self, jobs: int) -> None:
        """Check the request against the others of its key that are open. From any thread.

        Args:
            jobs: open ones of its key.

        Raises:
            RateLimited: it is one too many.
        """
        company = self._bucket.in_flight - (not self._is_released)
        if self.most is not None and company + jobs >= self.most:
            raise RateLimited(
                f"{company} other requests of {self._name} are unanswered and {jobs} jobs have not "
                f"ended, the most together is {self.most} (--max-in-flight-per-key)",
                retry_after_s=JOBS_RETRY_S,
            )


class RateLimiter:
    """The limits of every key. On one event loop."""

    def __init__(
        self, requests_per_minute: int | None, max_in_flight: int | None, clock: Clock
    ) -> None:
        self._per_minute, self._limit, self._clock = requests_per_minute, max_in_flight, clock
        self._buckets: dict[str, _Bucket] = {}  # as many as there are keys

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[Permit]:
        """Admit a request of this key, and count it until the block ends or its slot is released.

        Jobs are not counted here: a job that is sent again must be found first, see `Slot.check`.

        Raises:
            RateLimited: it is one too many; `retry_after_s` says when it would not be.
        """
        name = f"API key {key!r}" if key else "all clients together"
        if self._per_minute is None and self._limit is None:
            yield Permit(name, _Bucket(0.0, 0.0), None)
            return
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
                f"{bucket.in_flight} requests of {name} are unanswered, the most is "
                f"{self._limit} (--max-in-flight-per-key)",
                retry_after_s=_bounded(bucket.mean_s / bucket.in_flight),
            )
        if self._per_minute is not None:
            if bucket.tokens < 1 - 1e-9:  # rounding leaves a little less than a whole one
                raise RateLimited(
                    f"{name} may make {self._per_minute} requests a minute "
                    "(--requests-per-minute), and made them",
                    retry_after_s=_bounded((1 - bucket.tokens) * 60 / size),
                )
            bucket.tokens -= 1
        bucket.in_flight += 1
        return bucket


def _bounded(seconds: float) -> float:
    low, high = BOUNDS_S
    return min(max(seconds, low), high)
