"""Send answers of calls to the front's journals, several short ones in one message.

The engine's thread adds answers and decides after each turn whether to send; the writing thread
packs them. A message per short forward would cost more than the forward; a large message costs more
than several small ones, so at most `MOST_BYTES` are buffered.
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

if TYPE_CHECKING:  # imports torch
    from carpool.engine.journal import Answered

log = logging.getLogger("carpool")

MOST_BYTES = 128 << 10  # max buffered bytes
EVERY_S = 0.02  # min interval: a crash loses at most this and the current step


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Answers of calls; packed at sending, off the engine's thread."""

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
        """Buffer an answer. On the engine's thread."""
        self._answered.append(answered)
        self._passed.pop(answered.request_id, None)  # replaced by this one
        self._bytes += answered.size

    def add_passed(self, request_id: str, number: int) -> None:
        """Record a call whose answer is not sent. On the engine's thread."""
        self._passed[request_id] = number

    def replayed(self, request_id: str, number: int) -> None:
        """Report the end of a replay at once: the next call may end the process."""
        self.add_passed(request_id, number)
        self.flush()

    def after_turn(self) -> None:
        """Flush, at most every `EVERY_S` or when full. On the engine's thread."""
        is_due = self._bytes >= MOST_BYTES or self._clock() >= self._sent_s + EVERY_S
        if is_due and (self._answered or self._passed):
            self.flush()

    def flush(self) -> None:
        """Send the buffered answers. On any thread."""
        with self._lock:
            answered, self._answered, self._bytes = self._answered, [], 0
            passed, self._passed = self._passed, {}
            if answered or passed:
                self._sent_s = self._clock()
                self._put(AnswerBatch(answered, passed))
