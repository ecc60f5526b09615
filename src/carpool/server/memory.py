"""How much memory the bodies and pictures of unanswered requests take, in all and for one API key.

Bytes are counted as they arrive, so a request that announces much and sends nothing takes none.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from carpool.errors import Overloaded, RateLimited

AGAIN_S = 1.0  # the hint when to come again


class Held:
    """What one request holds."""

    def __init__(self, budget: "MemoryBudget", key: str) -> None:
        self._budget, self._key, self.bytes = budget, key, 0

    def take(self, size: int) -> None:
        """Count more bytes.

        Raises:
            RateLimited: it is too much beside other requests of its key.
            Overloaded: it is too much beside all other requests.
        """
        self._budget.check(self._key, self.bytes, size)
        self._count(size)

    def give(self, size: int) -> None:
        """Count fewer bytes: they are not held any more."""
        self._count(-size)

    def replace(self, old: int, new: int) -> None:
        """Count `new` bytes in place of `old` ones.

        Raises:
            RateLimited, Overloaded: as for `take`.
        """
        self.give(old)
        self.take(new)

    def _count(self, size: int) -> None:
        self.bytes += size
        self._budget.count(self._key, size)

    def metered(self, receive: Receive) -> Receive:
        """Count what is received of a body."""

        async def metered() -> Message:
            message = await receive()
            self.take(len(message.get("body", b"")))
            return message

        return metered


class MemoryBudget:
    """What all requests hold. On one event loop."""

    def __init__(self, most: int) -> None:
        """Nothing is held.

        Args:
            most: bytes in all; one key may hold half of them. A request that is the only one of
                all, or of its key, may hold more.
        """
        self._most, self._total = most, 0
        self._of_keys: Counter[str] = Counter()

    @contextmanager
    def open(self, key: str) -> Iterator[Held]:
        """Count what a request of this key holds, until the end of the block."""
        held = Held(self, key)
        try:
            yield held
        finally:
            held.give(held.bytes)

    def count(self, key: str, size: int) -> None:
        self._total += size
        self._of_keys[key] += size
        if not self._of_keys[key]:
            del self._of_keys[key]

    def check(self, key: str, own: int, more: int) -> None:
        """Refuse more bytes for a request that holds `own` ones."""
        flag = f"{self._most} in all (--max-in-flight-bytes)"
        others = self._of_keys[key] - own
        if key and others and others + own + more > self._most // 2:
            raise RateLimited(
                f"bodies and pictures of other requests of API key {key!r} hold {others} bytes: "
                f"with this one it would be more than {self._most // 2}, half of {flag}",
                retry_after_s=AGAIN_S,
            )
        others = self._total - own
        if others and others + own + more > self._most:
            raise Overloaded(
                f"bodies and pictures of other requests hold {others} bytes: with this one it "
                f"would be more than {flag}",
                retry_after_s=AGAIN_S,
            )
