"""Deliveries after the end of a job: webhooks and uploads, each at least once.

The job's row holds them from its acceptance, so one transaction stores its end and makes them due.
An attempt that a crash interrupted is repeated.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from carpool.errors import CarpoolError, StoreFailed, in_full
from carpool.jobs.database import Record
from carpool.jobs.interfaces import JobListener
from carpool.jobs.store import JobStore

log = logging.getLogger("carpool")

WAITS_S = (5.0, 20.0, 80.0, 320.0, 1280.0, 5120.0)
"""Waits between attempts, about two hours in total. A receiver down for longer misses its event."""
POLL_S = 5.0  # retry interval after a full queue or a disk error
MOST_AT_ONCE = 8  # concurrent attempts; each holds a connection, uploads also memory

Send = Callable[[Record], Awaitable[Mapping[str, Any]]]
"""Makes a delivery; returns its public fields, or raises."""


def waiting(**fields: Any) -> dict[str, Any]:
    """A delivery before its first attempt, with further public fields."""
    return {"state": "waiting", "attempts": 0, "error": None, **fields}


class Courier(JobListener):
    """Makes the deliveries of a store's ended jobs, until `run` is cancelled.

    Args:
        senders: by kind, in order: a kind waits until all earlier kinds are finished.
        waits_s: waits between attempts; attempts are one more than waits.
    """

    def __init__(
        self, store: JobStore, senders: Mapping[str, Send], waits_s: Sequence[float] = WAITS_S
    ) -> None:
        self._store, self._senders = store, senders
        self._waits_s, self._news = waits_s, asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def ended(self, *args: Any) -> None:
        self._news.set()

    async def run(self) -> None:
        try:
            while True:
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(await self._begin()):
                        await self._news.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _begin(self) -> float | None:
        """Start the due deliveries; returns the seconds until the next one, None for no limit."""
        try:
            records = await asyncio.to_thread(self._store.deliveries_due)
        except StoreFailed as error:
            log.error("deliveries cannot be read: %s", in_full(error))
            return POLL_S
        waits_s = list[float]()
        for record in (record for record in records if record.id not in self._tasks):
            left_s = (record.due_s or 0.0) - self._store.clock.uptime_s()
            if left_s <= 0 and len(self._tasks) < MOST_AT_ONCE:
                self._tasks[record.id] = asyncio.create_task(self._deliver(record))
            else:
                waits_s.append(left_s if left_s > 0 else POLL_S)
        return min(waits_s, default=None)

    async def _deliver(self, record: Record) -> None:
        deliveries, due_s = dict(record.deliveries or {}), None
        try:
            for kind, send in self._senders.items():
                entry = deliveries.get(kind)
                if not isinstance(entry, dict) or entry["state"] != "waiting":
                    continue
                deliveries[kind] = entry = await self._tried(send, record, entry)
                record = replace(record, deliveries=deliveries)
                if entry["state"] == "waiting":
                    due_s = self._store.clock.uptime_s() + self._waits_s[entry["attempts"] - 1]
                    break
                log.info("%s of job %s: %s", kind, record.id, entry["state"])
            await asyncio.to_thread(self._store.note_deliveries, record.id, deliveries, due_s)
        except StoreFailed as error:
            log.error("a delivery of job %s is not recorded: %s", record.id, in_full(error))
            await asyncio.sleep(POLL_S)  # the delivery is repeated
        finally:
            del self._tasks[record.id]
            self._news.set()

    async def _tried(self, send: Send, record: Record, entry: dict[str, Any]) -> dict[str, Any]:
        entry = {**entry, "attempts": entry["attempts"] + 1}
        try:
            return {**entry, "state": "delivered", "error": None, **await send(record)}
        except Exception as error:  # libraries and networks raise any class
            message = error.message if isinstance(error, CarpoolError) else type(error).__name__
            is_last = entry["attempts"] > len(self._waits_s)
            return {**entry, "state": "failed" if is_last else "waiting", "error": message[:300]}
