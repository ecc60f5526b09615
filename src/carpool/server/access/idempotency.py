"""`Idempotency-Key` for requests that are answered at once: the same request again costs nothing.

A client that lost its connection sends the request again with the key that it sent before. If the
first is still being worked on, the second waits for the same answer; if it has ended, it gets that
answer again. Answers are kept in memory, the youngest of them, and not those of failures: who
tries again after a failure wants another try. Jobs have keys of their own, in their store.
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
KEPT_S = 3600.0  # as long as links work, which answers may be
MOST_BYTES = 256 << 20

T = TypeVar("T")
Asked = tuple[str, str]
"""Whose key it is, and the key."""


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
    """What tells one request from another: path, body, digests of files."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class _Entry(Generic[T]):
    digest: str
    began_s: float
    task: "asyncio.Task[T]"
    waiters: int = 0
    bytes: int = 0


class Answers(Generic[T]):
    """The youngest answers by key. On one event loop."""

    def __init__(
        self,
        size: Callable[[T], int],
        clock: Clock,
        *,
        most_bytes: int = MOST_BYTES,
        kept_s: float = KEPT_S,
    ) -> None:
        """Nothing kept yet.

        Args:
            size: bytes of an answer.
            most_bytes: of all answers that are kept; the oldest go first.
            kept_s: how long one is kept.
        """
        self._size, self._clock = size, clock
        self._most_bytes, self._kept_s = most_bytes, kept_s
        self._entries: OrderedDict[Asked, _Entry[T]] = OrderedDict()

    async def once(
        self, owner: str, key: str | None, digest: str, work: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Give the answer to this key: an earlier one, or that of `work`.

        Work goes on while anybody waits for it.

        Args:
            owner: whose key it is: others may have the same.
            key: the client's; None: it has none, and is worked for.
            digest: what it is for.
            work: makes the answer.

        Raises:
            IdempotencyMismatch: the key came before with another digest.
            Exception: whatever `work` raises, for all who wait for it.
        """
        if key is None:
            return await work()
        asked = owner, key
        self._forget_old()
        entry = self._entries.get(asked)
        if entry is not None and entry.digest != digest:
            raise IdempotencyMismatch(
                f"Idempotency-Key {key!r} came before with another body: send a new key with "
                "a new request"
            )
        if entry is None:
            entry = self._entries[asked] = _Entry(
                digest, self._clock(), asyncio.create_task(work())
            )
        entry.waiters += 1
        try:
            answer = await asyncio.shield(entry.task)
        finally:
            entry.waiters -= 1
            self._settle(asked, entry)
        return answer

    def _settle(self, asked: Asked, entry: "_Entry[T]") -> None:
        """Keep what succeeded; give up what nobody waits for any more."""
        task = entry.task
        if task.done() and not task.cancelled() and task.exception() is None:
            entry.bytes = self._size(task.result())
            self._make_room()
        elif task.done() or not entry.waiters:
            task.cancel()
            if self._entries.get(asked) is entry:
                del self._entries[asked]

    def _forget_old(self) -> None:
        old_s = self._clock() - self._kept_s
        for asked, entry in list(self._entries.items()):
            if entry.began_s > old_s:
                break  # they lie in the order of their beginnings
            if entry.task.done():
                del self._entries[asked]

    def _make_room(self) -> None:
        held = sum(entry.bytes for entry in self._entries.values())
        for asked, entry in list(self._entries.items()):
            if held <= self._most_bytes:
                break
            if entry.bytes:
                held -= entry.bytes
                del self._entries[asked]
