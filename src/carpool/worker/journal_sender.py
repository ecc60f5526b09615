"""Sends the answers that calls got to the front's journals, several short ones in one message.

The engine's thread adds answers and decides after each turn whether to send; the writing thread
packs them. One message for each short forward would cost more than the forward; a large message
costs more than several small ones, so at most `MOST_BYTES` wait.
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

MOST_BYTES = 128 << 10  # bytes that may wait
EVERY_S = 0.02  # at most so often: a crash costs no more than this and the step under way


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Answers of calls; packed when they are sent, off the engine's thread."""

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


class JournalSender:
    """Collects answers and sends them.

    Args:
        put: queues a batch to the front; must not block.
        clock: seconds.
    """

    def __init__(self, put: Callable[[AnswerBatch], None], clock: Clock = time.monotonic) -> None:
        self._put, self._clock = put, clock
        self._answered: list[Answered] = []
        self._passed: dict[str, int] = {}
        self._sent_s, self._bytes = -EVERY_S, 0
        self._lock = threading.Lock()

    def add(self, answered: "Answered") -> None:
        """An answer is to be sent. On the engine's thread."""
        self._answered.append(answered)
        self._passed.pop(answered.request_id, None)  # an earlier call's
        self._bytes += answered.size

    def add_passed(self, request_id: str, number: int) -> None:
        """A call was answered, and its answer is not sent. On the engine's thread."""
        self._passed[request_id] = number

    def replayed(self, request_id: str, number: int) -> None:
        """A journal ends with this call: said before the next one may end the process."""
        self.add_passed(request_id, number)
        self.flush()

    def after_turn(self) -> None:
        """Send what is there, unless something was sent just now. On the engine's thread."""
        is_due = self._bytes >= MOST_BYTES or self._clock() >= self._sent_s + EVERY_S
        if is_due and (self._answered or self._passed):
            self.flush()

    def flush(self) -> None:
        """Send what is there. On any thread."""
        with self._lock:
            answered, self._answered, self._bytes = self._answered, [], 0
            passed, self._passed = self._passed, {}
            if answered or passed:
                self._sent_s = self._clock()
                self._put(AnswerBatch(answered, passed))
