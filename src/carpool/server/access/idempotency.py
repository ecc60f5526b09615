"""`Idempotency-Key` for synchronous requests: a retry gets the answer of the first request.

While the first request runs, a retry waits for its answer; afterwards it gets the stored answer.
The newest answers are kept in memory; failures are not, so a retry of a failure runs again.
Jobs have their keys in the job store.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request

from carpool.errors import IdempotencyMismatch, InvalidValue
from carpool.types import Clock

MOST_KEY = 255  # characters
KEPT_S = 3600.0  # the lifetime of the signed links that answers may contain
MOST_BYTES = 256 << 20

T = TypeVar("T")


def key_of(request: Request) -> str | None:
    """The key that a client sent, if any.

    Raises:
        InvalidValue: it is empty, too long, or not text.
    """
    key = request.headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= MOST_KEY and key.isprintable()):
        rule = f"must be 1 to {MOST_KEY} printable characters"
        raise InvalidValue(f"Idempotency-Key={key[:40]!r}: {rule}", param="Idempotency-Key")
    return key


def digest_of(*parts: Any) -> str:
    """Digest of a request's path, body and files."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class _Entry(Generic[T]):
    digest: str
    began_s: float
    task: "asyncio.Task[T]"
    waiters: int = 0
    bytes: int = 0


class IdempotencyCache(Generic[T]):
    """The newest answers by owner and key. Not thread-safe: one event loop."""

    def __init__(
        self,
        size: Callable[[T], int],
        clock: Clock,
        *,
        most_bytes: int = MOST_BYTES,
        kept_s: float = KEPT_S,
    ) -> None:
        """An empty cache.

        Args:
            size: bytes of an answer.
            most_bytes: limit for all stored answers; the oldest are evicted first.
            kept_s: lifetime of an answer.
        """
        self._size, self._clock, self._most_bytes, self._kept_s = size, clock, most_bytes, kept_s
        self._entries: OrderedDict[tuple[str, str], _Entry[T]] = OrderedDict()  # oldest first

    async def once(
        self, owner: str, key: str | None, digest: str, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Return the stored answer for this key, or run `work` while a client waits for it.

        Args:
            key: the client's; None: `work` runs for this request alone.
            digest: digest of the request.

        Raises:
            IdempotencyMismatch: the key came before with another digest.
            Exception: an exception of `work`, in every request that waits for it.
        """
        if key is None:
            return await work()
        place = owner, key
        self._forget_old()
        entry = self._entries.get(place)
        if entry is not None and entry.digest != digest:
            raise IdempotencyMismatch(
                f"Idempotency-Key {key!r} came before with another body: send a new key with "
                "a new request"
            )
        if entry is None:
            entry = _Entry(digest, self._clock(), asyncio.create_task(work()))
            self._entries[place] = entry
        entry.waiters += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiters -= 1
            self._settle(place, entry)

    def _settle(self, place: tuple[str, str], entry: "_Entry[T]") -> None:
        """Store a successful answer; cancel work that no client waits for."""
        task = entry.task
        if task.done() and not task.cancelled() and task.exception() is None:
            entry.bytes = self._size(task.result())
            self._make_room()
        elif task.done() or not entry.waiters:
            task.cancel()
            if self._entries.get(place) is entry:
                del self._entries[place]

    def _forget_old(self) -> None:
        old_s = self._clock() - self._kept_s
        for place, entry in list(self._entries.items()):
            if entry.began_s > old_s:
                break
            if entry.task.done():
                del self._entries[place]

    def _make_room(self) -> None:
        total = sum(entry.bytes for entry in self._entries.values())
        for place, entry in list(self._entries.items()):
            if total <= self._most_bytes:
                break
            if entry.bytes:
                total -= entry.bytes
                del self._entries[place]
