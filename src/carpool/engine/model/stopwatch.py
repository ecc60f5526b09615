"""Seconds of forwards on the device: by events on accelerators, so that nothing waits for them."""

from collections import deque
from typing import Any

import torch

from carpool.engine.model.device import Device

Laps = list[torch.Event]
"""When a forward began, paused, went on, ... and ended, in its device's queue of work."""


class Stopwatch:
    """Times forwards on a device that has events, which are read once they are over."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._laps: Laps | None = None  # of the forward that is being launched
        self._running: deque[tuple[Any, Laps]] = deque()
        self._over: list[tuple[Any, float]] = []

    def start(self) -> None:
        self._laps = [self._now()]

    def swap(self, laps: Laps | None) -> Laps | None:
        """Pause the present forward, and go on with another one; None: with none.

        Forwards that share a sweep over streamed weights take turns: see `sweep.py`.

        Returns:
            what goes on with the present one.
        """
        before, self._laps = self._laps, laps
        for watch in (before, laps):
            if watch is not None:
                watch.append(self._now())
        return before

    def stop(self, note: Any) -> None:
        """Note that a forward was launched.

        Args:
            note: comes back with its seconds, pauses left out.
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
        """Notes and seconds of the forwards that are over, each once."""
        over, self._over = self._over, []
        return over
