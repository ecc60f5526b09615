"""A bus from disk to host with the speed of one from host to device; sweeps over it, measured."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from carpool import Engine, Request
from carpool.engine.weights.backing_store import Store
from carpool.engine.weights.bus import Bus, Slot
from carpool.engine.weights.groups import BlockGroup

GIB = 2**30


class HeldBus(Bus):
    """Limits loads to a bandwidth by sleeping, without using the processor.

    A load counts from the end of the previous load, however late the reading thread wakes up:
    devices copy queued data without the host.
    """

    bytes_per_s = float("inf")

    def __init__(self, store: Store, device: torch.device) -> None:
        super().__init__(store, device)
        self._asked_s: deque[float] = deque()  # request times of loads that have not begun
        self._free_s = 0.0  # end of the last load

    def load(self, group: BlockGroup, slot: Slot) -> Callable[[], object]:
        self._asked_s.append(self.clock())
        return super().load(group, slot)

    def _read(self, group: BlockGroup, slot: Slot) -> torch.Event | None:
        began_s = max(self._free_s, self._asked_s.popleft())
        event = super()._read(group, slot)
        self._free_s = began_s + group.n_bytes / self.bytes_per_s
        hold(began_s, group.n_bytes / self.bytes_per_s)
        return event


def swept(engine: Engine, sets: Sequence[Sequence[Request]]) -> tuple[float, int, float]:
    """Draw sets of requests in sequence; returns seconds, sweeps, and GiB that were moved."""
    before, began_s = engine.statistics()["streaming"], time.monotonic()
    for requests in sets:
        engine.generate(requests, progress=False)
    took_s, after = time.monotonic() - began_s, engine.statistics()["streaming"]
    moved = (after["moved_bytes"] - before["moved_bytes"]) / GIB
    return took_s, after["sweeps"] - before["sweeps"], moved


def hold(began_s: float, seconds: float) -> None:
    """Sleep until `seconds` have passed since `began_s`."""
    time.sleep(max(0.0, began_s + seconds - time.monotonic()))
