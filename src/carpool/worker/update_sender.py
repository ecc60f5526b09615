"""Sends the progress of requests and the answers of their calls, several in one message.

The engine's thread adds updates; the writing thread packs and sends them at most every `EVERY_S`.
Waking that thread at each step would cost more than a short step: both need the interpreter. A
large message costs more than several small ones: the writer wakes once `MOST_BYTES` are queued.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from carpool.errors import reason
from carpool.types import Clock
from carpool.worker import protocol

if TYPE_CHECKING:  # it imports torch
    from carpool.engine.journal import Answered

log = logging.getLogger("carpool")

MOST_BYTES = 128 << 10  # bytes queued before the writer wakes early
EVERY_S = 0.05  # between messages: a crash loses this much progress and the current step


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Answers of calls, packed by the writing thread, not by the engine's."""

    answered: "list[Answered]"
    passed: dict[str, int]

    def packed(self) -> protocol.Answers:
        entries = []
        for answer in self.answered:
            try:
                entries.append((answer.request_id, answer.entry()))
            except Exception as error:  # the device failed: that call runs again
                log.warning("an answer is missing in a journal: %s", reason(error))
        return protocol.Answers(entries, self.passed)


ProgressUpdate = AnswerBatch | protocol.Progress


class UpdateSender:
    """Collects updates until they are due. Thread-safe.

    Args:
        put: queues an update to the front; None wakes the writing thread. Must not block.
        clock: seconds.
    """

    def __init__(
        self, put: Callable[[ProgressUpdate | None], None], clock: Clock = time.monotonic
    ) -> None:
        self._put, self._clock = put, clock
        self._answered: list[Answered] = []
        self._passed: dict[str, int] = {}
        self._steps: dict[str, protocol.Progress] = {}
        self._sent_s, self._bytes = -EVERY_S, 0
        self._is_awake = False  # the writing thread will call `due`
        self._lock = threading.Lock()

    def add(self, answered: "Answered") -> None:
        with self._lock:
            self._answered.append(answered)
            self._passed.pop(answered.request_id, None)  # number of an earlier call
            self._bytes += answered.size
            self._wake()

    def add_passed(self, request_id: str, number: int) -> None:
        """Note that a call was answered; its answer is not sent."""
        with self._lock:
            self._passed[request_id] = number
            self._wake()

    def add_step(self, request_id: str, step: int, steps: int) -> None:
        """Queue a step of a request; step 0, a restart, is sent at once."""
        progress = protocol.Progress(request_id, step, steps)
        with self._lock:
            if step:
                self._steps[request_id] = progress
                self._wake()
            else:
                self._steps.pop(request_id, None)
                self._put(progress)

    def replayed(self, request_id: str, number: int) -> None:
        """Report a journal's last call before the next call, which may end the process."""
        self.add_passed(request_id, number)
        self.flush()

    def flush(self) -> None:
        """Send all collected updates."""
        with self._lock:
            for update in self._take():
                self._put(update)

    def ends(self, request_id: str) -> None:
        """Send the last step of a request, before its outcome."""
        with self._lock:
            if (progress := self._steps.pop(request_id, None)) is not None:
                self._put(progress)

    def wait_s(self) -> float | None:
        """Seconds until the writing thread calls `due`; None: it sleeps until woken."""
        with self._lock:
            if not self._is_awake:
                return None
            is_large = self._bytes >= MOST_BYTES
            return 0.0 if is_large else max(0.0, self._sent_s + EVERY_S - self._clock())

    def due(self) -> list[ProgressUpdate]:
        """Updates to send now, after `wait_s` seconds. Called on the writing thread."""
        with self._lock:
            updates = self._take()
            self._is_awake = bool(updates)
            return updates

    def _take(self) -> list[ProgressUpdate]:
        updates: list[ProgressUpdate] = [*self._steps.values()]
        if self._answered or self._passed:
            updates.append(AnswerBatch(self._answered, self._passed))
        if updates:
            self._answered, self._passed, self._steps, self._bytes = [], {}, {}, 0
            self._sent_s = self._clock()
        return updates

    def _wake(self) -> None:
        if not self._is_awake or self._bytes >= MOST_BYTES:
            self._is_awake = True
            self._put(None)
