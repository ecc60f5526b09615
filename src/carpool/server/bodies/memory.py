"""Memory budget for bodies and pictures of open requests: a total, and a share per API key.

Bytes count as they arrive: a large Content-Length alone takes nothing from the budget.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from carpool.errors import BodyTooLarge, Overloaded, RateLimited

RETRY_S = 1.0
_FLAG = "--max-in-flight-bytes"


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
            raise RateLimited(problem, retry_after_s=RETRY_S)
        other_bytes = self.by_key.total() - own_bytes
        if other_bytes and other_bytes + own_bytes + size > self._limit:
            use = f"bodies and pictures of other requests hold {other_bytes} bytes"
            problem = f"{use}: with this one it would be more than {self._limit} ({_FLAG})"
            raise Overloaded(problem, retry_after_s=RETRY_S)
