"""What one API key may ask for: requests a minute, and requests unanswered at once.

A bucket for each key: it holds a minute's worth of requests, fills again steadily, and a request
takes one out. So a quiet client may come with a burst, and none can save up for more than a
minute. Where there are no keys, all clients share one bucket. A refused request takes nothing.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from carpool.errors import RateLimited
from carpool.types import Clock

BOUNDS_S = (0.1, 120.0)  # of hints when to come again; SDKs ignore longer ones


@dataclass(slots=True)
class _Client:
    tokens: float
    filled_s: float
    in_flight: int = 0
    mean_s: float = 1.0  # how long its requests take: moving mean


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
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Let a request of this key in, and count it until the block is left.

        Raises:
            RateLimited: it is one too many; `retry_after_s` says when it would not be.
        """
        if self._per_minute is None and self._max_in_flight is None:
            yield
            return
        began_s = self._clock()
        client = self._enter(key, began_s)
        try:
            yield
        finally:
            client.in_flight -= 1
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
