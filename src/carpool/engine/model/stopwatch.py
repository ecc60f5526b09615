"""Seconds of forwards on the device, measured by events so that the host does not wait."""

from collections import deque
from typing import Any

import torch

from carpool.engine.model.device import Device

Laps = list[torch.Event]
"""Start, pause, resume, ..., end of a forward, as events in the device's stream."""


class Stopwatch:
    """Times forwards on a device with events; results are read after their end."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._laps: Laps | None = None  # laps of the forward being launched
        self._running: deque[tuple[Any, Laps]] = deque()
        self._over: list[tuple[Any, float]] = []

    def start(self) -> None:
        self._laps = [self._now()]

    def swap(self, laps: Laps | None) -> Laps | None:
        """Pause the current forward, and resume another one; None: none.

        Forwards that share a sweep over streamed weights take turns: see `sweep.py`.

        Returns:
            The laps of the paused forward, to resume it.
        """
        before, self._laps = self._laps, laps
        for watch in (before, laps):
            if watch is not None:
                watch.append(self._now())
        return before

    def stop(self, note: Any) -> None:
        """End a forward's launch.

        Args:
            note: returned by `read` with its seconds, without pauses.
        """
        assert self._laps is not None
        self._laps.append(self._now())
        self._running.append((note, self._laps))
        self._laps = None
        while self._running and self._running[0][1][-1].query():
            note, laps = self._running.popleft()
            turns = zip(laps[::2], laps[1::2], strict=True)
            self._over.append((note, sum(a.elapsed_time(b) for a, b in turns) / 1000))

    def _now(self) -> torch.Event:
        event = self._device.timed_event()
        event.record()
        return event

    def read(self) -> list[tuple[Any, float]]:
        """Notes and seconds of the completed forwards, each returned once."""
        over, self._over = self._over, []
        return over
