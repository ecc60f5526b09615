"""What one API key may ask for: requests a minute, and how much of it is open at once.

A bucket for each key: it holds a minute's worth of requests, fills again steadily, and a request
takes one out. So a quiet client may come with a burst, and none can save up for more than a
minute. Where there are no keys, all clients share one bucket. A refused request takes nothing, but
for one that is refused because of jobs: it takes one out of the bucket.

Open are requests without an answer and jobs that have not ended, wherever those were begun: the
store counts these. A request that becomes a job leaves its place first, and the store holds it
against the others while it alone writes. So no order of events lets one too many in.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from carpool.errors import RateLimited
from carpool.types import Clock

BOUNDS_S = (0.1, 120.0)  # of hints when to come again; SDKs ignore longer ones
JOBS_AGAIN_S = 10.0  # the hint where jobs are among what is open


@dataclass(slots=True)
class _Client:
    tokens: float
    filled_s: float
    in_flight: int = 0
    mean_s: float = 1.0  # how long its requests take: moving mean


class Place:
    """Where a request that was let in is counted."""

    def __init__(self, whom: str, client: _Client, most: int | None) -> None:
        self._whom, self._client, self._has_left = whom, client, False
        self.most = most  # open at once; None: any number

    def leave(self) -> bool:
        """Count it no more: it is answered, or a job. Says whether it was counted till now."""
        was_there, self._has_left = not self._has_left, True
        self._client.in_flight -= was_there
        return was_there

    def check(self, jobs: int) -> None:
        """Hold the request against what else is open. From any thread.

        Args:
            jobs: of its key, open just now.

        Raises:
            RateLimited: it is one too many.
        """
        others = self._client.in_flight - (not self._has_left)
        if self.most is not None and others + jobs >= self.most:
            raise RateLimited(
                f"{others} other requests of {self._whom} are unanswered and {jobs} jobs have not "
                f"ended, the most together is {self.most} (--max-in-flight-per-key)",
                retry_after_s=JOBS_AGAIN_S,
            )


class Limits:
    """The limits of every key. On one event loop."""

    def __init__(
        self, requests_per_minute: int | None, max_in_flight: int | None, clock: Clock
    ) -> None:
        self._per_minute, self._max_in_flight, self._clock = (
            requests_per_minute,
            max_in_flight,
            clock,
        )
        self._clients: dict[str, _Client] = {}  # as many as there are keys

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[Place]:
        """Let a request of this key in, and count it until the block or its place is left.

        Jobs are not looked at: a job that is sent again must be found first, see `Place.check`.

        Raises:
            RateLimited: it is one too many; `retry_after_s` says when it would not be.
        """
        if self._per_minute is None and self._max_in_flight is None:
            yield Place(_whom(key), _Client(0.0, 0.0), None)
            return
        began_s = self._clock()
        client = self._enter(key, began_s)
        place = Place(_whom(key), client, self._max_in_flight)
        try:
            yield place
        finally:
            if place.leave():
                client.mean_s += 0.2 * (self._clock() - began_s - client.mean_s)

    def _enter(self, key: str, now_s: float) -> _Client:
        most = float(self._per_minute or 0)
        client = self._clients.setdefault(key, _Client(most, now_s))
        client.tokens = min(most, client.tokens + (now_s - client.filled_s) * most / 60)
        client.filled_s = now_s
        if self._max_in_flight is not None and client.in_flight >= self._max_in_flight:
            raise RateLimited(
                f"{client.in_flight} requests of {_whom(key)} are unanswered, the most is "
                f"{self._max_in_flight} (--max-in-flight-per-key)",
                retry_after_s=_bounded(client.mean_s / client.in_flight),
            )
        if self._per_minute is not None:
            if client.tokens < 1 - 1e-9:  # whatever rounding leaves of a whole one will do
                raise RateLimited(
                    f"{_whom(key)} may make {self._per_minute} requests a minute "
                    "(--requests-per-minute), and made them",
                    retry_after_s=_bounded((1 - client.tokens) * 60 / most),
                )
            client.tokens -= 1
        client.in_flight += 1
        return client


def _whom(key: str) -> str:
    return f"API key {key!r}" if key else "all clients together"


def _bounded(seconds: float) -> float:
    least, most = BOUNDS_S
    return min(max(seconds, least), most)
