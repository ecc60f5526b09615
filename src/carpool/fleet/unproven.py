"""Connections that have not proven yet that they know the fleet's secret: few, the newest.

A front proves it in milliseconds. A peer that proves nothing keeps its place until newer ones need
it, so silent peers keep no front out, whatever address it has: the address with the most of them
loses its oldest.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

PER_ADDRESS = 8
LIMIT = 32


class UnprovenConnections:
    """Those of one worker's host. On one event loop."""

    def __init__(self) -> None:
        self._addresses: dict[asyncio.StreamWriter, str] = {}  # oldest first

    @contextmanager
    def hold(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Count a connection for the block; another one may have it closed meanwhile."""
        peer = writer.get_extra_info("peername")  # None where it has gone already
        address = str(peer[0]) if peer else ""
        counts = Counter(self._addresses.values())
        if counts[address] >= PER_ADDRESS:
            self._close_oldest(address)
        elif len(self._addresses) >= LIMIT:
            self._close_oldest(max(counts, key=lambda address: counts[address]))
        self._addresses[writer] = address
        try:
            yield
        finally:
            self._addresses.pop(writer, None)

    def _close_oldest(self, address: str) -> None:
        first = next(writer for writer, of in self._addresses.items() if of == address)
        del self._addresses[first]
        first.transport.abort()
