"""The bus: moves weights from the host, or a file, into slots on the device.

On an accelerator copies run in their own stream, ordered with the computation by events: the host
does not wait. An accelerator without events, or with one stream only, copies between its
computations. A thread reads files.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from carpool.engine.streams import stream_of, why_no_events
from carpool.engine.weights.backing_store import Store, host_buffer
from carpool.engine.weights.groups import BlockGroup
from carpool.types import Clock

log = logging.getLogger("carpool")

TIMED_IN_ORDER = 16  # loads timed on a device without events, by synchronizing it


@dataclass(slots=True, eq=False)
class Slot:
    """Memory on the device for one group."""

    buffer: Tensor  # (bytes,), uint8
    group: BlockGroup
    vacated: torch.Event | None  # end of the computation that last used the memory
    arrive: Callable[[], object] | None = None  # waits for the group; None: it has arrived
    users: int = 0  # forwards that compute with it


class Bus:
    """Moves groups into slots, one at a time.

    Args:
        store: the store of the groups.
        device: the device of the slots.
        clock: times the loads.
    """

    def __init__(self, store: Store, device: torch.device, clock: Clock = time.monotonic) -> None:
        self.store, self.clock, self._device = store, clock, device
        self._is_accelerator = device.type != "cpu"
        why = why_no_events(device)
        self._stream = None if why else stream_of(device)
        if self._is_accelerator and self._stream is None:
            log.warning(
                "%s has %s: weights are copied between its computations, not in parallel",
                device, f"no events ({why})" if why else "one stream only",
            )  # fmt: skip
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="carpool-weights")
        self._staging: Tensor | None = None  # host buffer between a file and an accelerator
        self._lock = threading.Lock()
        self._copies: deque[tuple[torch.Event, torch.Event, int]] = deque()  # copies not yet timed
        self._timed_bytes, self._timed_s = 0, 0.0
        self.moved_bytes = self.loads = 0

    def load(self, group: BlockGroup, slot: Slot) -> Callable[[], object]:
        """Begin to load a group; returns a function that waits for its arrival."""
        self.moved_bytes += group.n_bytes
        self.loads += 1
        if self.store.is_pinned:
            if self._stream is None:
                return self._in_order(group, slot)
            start, end = self._copy(slot, lambda: self.store.read(group, slot.buffer))
            self._copies.append((start, end, group.n_bytes))
            return lambda: torch.accelerator.current_stream(self._device).wait_event(end)
        read = self._reader.submit(self._read, group, slot)

        def arrive() -> None:
            event = read.result()
            if event is not None:
                torch.accelerator.current_stream(self._device).wait_event(event)

        return arrive

    def vacated(self) -> torch.Event | None:
        """An event for the release of a slot; None if work runs in order anyway."""
        if self._stream is None:
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    def _in_order(self, group: BlockGroup, slot: Slot) -> Callable[[], object]:
        """Copy in the computing stream: it arrives before later work in the stream."""
        is_timed = self.loads <= TIMED_IN_ORDER
        if is_timed:
            torch.accelerator.synchronize(self._device)
        began_s = self.clock()
        self.store.read(group, slot.buffer)
        if is_timed:
            torch.accelerator.synchronize(self._device)
            self._took(group.n_bytes, self.clock() - began_s)
        return lambda: None

    def _read(self, group: BlockGroup, slot: Slot) -> torch.Event | None:
        """Load from a file; on the reader's thread."""
        began_s, event = self.clock(), None
        if not self._is_accelerator:
            self.store.read(group, slot.buffer)
        else:
            if self._staging is None or len(self._staging) < group.n_bytes:
                self._staging = host_buffer(group.n_bytes)
            part, into = self._staging[: group.n_bytes], slot.buffer[: group.n_bytes]
            self.store.read(group, part)
            # wait on this thread: the host buffer is reused
            if self._stream is None:
                into.copy_(part)
                torch.accelerator.synchronize(self._device)
            else:
                _, event = self._copy(slot, lambda: into.copy_(part, non_blocking=True))
                event.synchronize()
        self._took(group.n_bytes, self.clock() - began_s)
        return event

    def _copy(self, slot: Slot, copy: Callable[[], object]) -> tuple[torch.Event, torch.Event]:
        """Queue a copy after the computation that last used the slot."""
        assert self._stream is not None
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        with self._stream:
            if slot.vacated is not None:
                self._stream.wait_event(slot.vacated)
            start.record()
            copy()
            end.record()
        return start, end

    def _took(self, n_bytes: int, seconds: float) -> None:
        with self._lock:
            self._timed_bytes += n_bytes
            self._timed_s += seconds

    def seconds_a_byte(self) -> float:
        """Mean seconds a byte so far; 0 before the end of the first load."""
        while self._copies and self._copies[0][1].query():
            start, end, n_bytes = self._copies.popleft()
            self._took(n_bytes, start.elapsed_time(end) / 1000)
        return self._timed_s / self._timed_bytes if self._timed_bytes else 0.0

    def close(self) -> None:
        """Wait for copies in progress, and release the store."""
        self._reader.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        self.store.close()
