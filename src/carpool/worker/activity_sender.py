"""Send the engine's activity to the front, a few times a second, while watched."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from carpool.telemetry.activity import Snapshot
from carpool.worker import protocol

if TYPE_CHECKING:  # imports torch
    from carpool.engine.observe.activity import ActivityLog

INTERVAL_S = 0.25


class ActivitySender:
    """A thread that reads an `ActivityLog` and a snapshot of requests while it is on.

    Args:
        snapshot: returns the engine's current requests.
        send: queues a message to the front.
    """

    def __init__(
        self,
        log: "ActivityLog",
        snapshot: Callable[[], Snapshot],
        send: Callable[[protocol.Activity], None],
    ) -> None:
        self._log, self._snapshot, self._send = log, snapshot, send
        self._is_on = threading.Event()
        self._was_idle = False
        self._thread: threading.Thread | None = None

    def watch(self, is_on: bool) -> None:
        """Start or stop. On the thread that reads messages."""
        self._log.is_on, self._was_idle = is_on, False
        if not is_on:
            self._is_on.clear()
            return
        self._is_on.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="carpool-activity", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        while self._is_on.wait():
            if (message := self.read()) is not None:
                self._send(message)
            pause.wait(INTERVAL_S)

    def read(self) -> protocol.Activity | None:
        """The activity to send now; None while the engine is idle, after that was sent."""
        forwards, missed = self._log.take()
        now = self._snapshot()
        is_idle = not (forwards or now.running or now.waiting)
        if is_idle and self._was_idle:
            return None
        self._was_idle = is_idle
        return protocol.Activity(now, forwards, missed)
