"""Stream the weights of blocks to the device: one group computes while the next one loads.

There are two buffers of equal size, each large enough for the largest group; smaller groups share
one. The weights of the computing group are views of its buffer. As soon as all groups of a buffer
have computed, their likely successors are loaded into it, of any component: after the last group of
a denoiser usually its first, so a sweep starts with its first groups loaded.

Weights that are not on the device are NaN.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from carpool.engine.fiber import in_fiber, park
from carpool.engine.weights.bus import Bus, Slot
from carpool.engine.weights.groups import BlockGroup, aligned, form, unhook
from carpool.engine.weights.residency import SLOTS
from carpool.engine.weights.sample import sample

log = logging.getLogger("carpool")

REMEMBERED = 8  # recent successors remembered per group
WATCHED = 3  # first forwards of a component that are checked for uses of weights outside of blocks


@dataclass(slots=True, eq=False)
class Buffer:
    """Device memory for consecutive groups."""

    memory: Tensor  # (bytes,), uint8
    slots: list[Slot] = field(default_factory=list)  # its groups, in order
    vacated: torch.Event | None = None  # end of the last computation that used it

    def is_idle(self, awaited: Collection[BlockGroup]) -> bool:
        """Whether no group in it computes or is in `awaited`."""
        return not any(slot.users or slot.group in awaited for slot in self.slots)

    @property
    def room(self) -> int:
        """Free bytes after the last group."""
        return len(self.memory) - self._end

    @property
    def _end(self) -> int:
        return sum(aligned(len(slot.buffer)) for slot in self.slots)

    def cleared(self) -> "Buffer":
        """Empty the buffer and return it."""
        self.slots.clear()
        return self

    def add(self, group: BlockGroup) -> Slot:
        """Add a slot for a group."""
        begin = self._end
        slot = Slot(self.memory[begin : begin + group.n_bytes], group, vacated=self.vacated)
        self.slots.append(slot)
        return slot


class Streamer:
    """The streamed weights of one pipeline. For the engine's thread.

    Args:
        modules: the streamed modules, by component.
        paths: paths of their streamed blocks, in order.
        device: the device on which they compute.
        bus: moves the weights; its store is empty at first.

    Attributes:
        samples: digests of the weights, taken before they are unloaded; see `sample.py`.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        paths: Mapping[str, Sequence[str]],
        device: torch.device,
        bus: Bus,
    ) -> None:
        self.bus, self._device, self._modules = bus, device, dict(modules)
        self.samples = {name: sample(module) for name, module in modules.items()}
        self.groups: list[BlockGroup] = []
        for name, module in modules.items():
            first = len(self.groups)
            self.groups += form(
                name, module, paths[name], device, first, self._onload, self._offload
            )
        self._owners = {id(p.owner): group for group in self.groups for p in group.places}
        self._pinned: set[BlockGroup] = set()  # on the device from now on
        self._blanks: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for group in self.groups:
            bus.store.write(group)
            self._unbind(group)
        size = max(group.n_bytes for group in self.groups)
        self._buffers = [self._buffer(size) for _ in range(SLOTS)]
        self._successors = self._in_order()
        self._filling = self._buffers[0]  # the buffer of the latest load
        self._last: BlockGroup | None = None
        self._watched: dict[str, int] = {}
        self.waited_s = 0.0

    def _in_order(self) -> dict[BlockGroup, deque[BlockGroup]]:
        """The initial successor of each group: the next of its component; last to first."""
        successors: dict[BlockGroup, deque[BlockGroup]] = {}
        for name in self._modules:
            groups = [group for group in self.groups if group.component == name]
            for group, after in zip(groups, [*groups[1:], groups[0]], strict=True):
                successors[group] = deque([after], REMEMBERED)
        return successors

    def _after(self, group: BlockGroup) -> BlockGroup:
        """The most frequent recent successor of a group; of equally frequent ones the latest."""
        return Counter(reversed(self._successors[group])).most_common(1)[0][0]

    def _buffer(self, n_bytes: int) -> "Buffer":
        return Buffer(torch.empty(n_bytes, dtype=torch.uint8, device=self._device))

    # Streamed weights

    def bytes_of(self, component: str) -> int:
        """Bytes that one sweep over a component moves; 0 for a resident component."""
        return sum(
            group.n_bytes
            for group in self.groups
            if group.component == component and group not in self._pinned
        )

    def seconds_of(self, component: str) -> float:
        """Bus seconds of one sweep over a component, by the mean of the loads so far."""
        return self.bytes_of(component) * self.bus.seconds_a_byte()

    @property
    def components(self) -> Collection[str]:
        return self._modules.keys()

    @property
    def pins(self) -> int:
        """Number of groups that `pin` keeps on the device."""
        return len(self._pinned)

    def statistics(self) -> dict[str, Any]:
        """Bytes and seconds since the start, and the streamed bytes of each component."""
        return {
            "streamed_bytes": {name: self.bytes_of(name) for name in self._modules},
            "slot_bytes": sum(len(buffer.memory) for buffer in self._buffers),
            "moved_bytes": self.bus.moved_bytes,
            "loads": self.bus.loads,
            "waited_s": self.waited_s,
            "seconds_a_gib": self.bus.seconds_a_byte() * 2**30,
        }

    # Loading

    def _onload(self, group: BlockGroup) -> None:
        """Load a block that is about to compute; called by diffusers' hook."""
        if group in self._pinned:
            return
        if in_fiber("forward"):
            park(group)  # the sweep loads it once for all forwards parked here
        else:
            self.require(group)

    def _offload(self, group: BlockGroup) -> None:
        """Unload a block that has computed; called by diffusers' hook."""
        if not in_fiber("forward"):
            self.release(group)

    def require(self, group: BlockGroup) -> None:
        """Put a group's weights on the device, and start to load its successor."""
        if group in self._pinned:
            return
        slot = self._of(group) or self._load(group)
        slot.users += 1
        if self._last is not None:
            self._successors[self._last].append(group)
        self._last = group
        self.prefetch(self._after(group))
        try:
            if slot.arrive is not None:
                began_s = self.bus.clock()
                slot.arrive()
                slot.arrive = None
                self.waited_s += self.bus.clock() - began_s
        except BaseException:
            slot.users -= 1
            raise
        for place in group.places:
            place.put(place.in_(slot.buffer))

    def release(self, group: BlockGroup) -> None:
        """Release a group's weights: one user has finished."""
        slot = self._of(group)
        if group in self._pinned or slot is None or not slot.users:
            return
        slot.users -= 1
        if not slot.users:
            self._unbind(group)
            buffer = next(candidate for candidate in self._buffers if slot in candidate.slots)
            buffer.vacated = self.bus.vacated()
            if group is self._last:  # start now, not only when the next group is required
                self.prefetch(self._after(group))

    def prefetch(self, group: BlockGroup) -> None:
        """Start to load a group and its successors, while buffers have room."""
        expected: set[BlockGroup] = set()
        for successor in self._from(group):
            if successor not in self._pinned and self._of(successor) is None:
                at = self._filling
                if at.room < successor.n_bytes:
                    free = (buffer for buffer in self._buffers if buffer.is_idle(expected))
                    if (vacant := next(free, None)) is None:
                        return
                    at = self._filling = vacant.cleared()
                self._begin(successor, at)
            expected.add(successor)

    def _from(self, group: BlockGroup) -> Iterator[BlockGroup]:
        """The expected sequence of groups: this one and its successors."""
        for _ in self.groups:
            yield group
            group = self._after(group)

    def _of(self, group: BlockGroup) -> Slot | None:
        return next((s for buffer in self._buffers for s in buffer.slots if s.group is group), None)

    def _load(self, group: BlockGroup) -> Slot:
        """Load an unexpected group, replacing prefetched ones."""
        free = [buffer for buffer in self._buffers if not any(slot.users for slot in buffer.slots)]
        if not free:  # nested blocks
            free = [self._buffer(len(self._buffers[0].memory))]
            self._buffers += free
            log.warning("%s needs another slot of streamed weights: %d", group, len(self._buffers))
        awaited = {expected: place for place, expected in enumerate(self._from(group))}

        def needed(buffer: Buffer) -> int:
            never = len(awaited)
            return min((awaited.get(s.group, never) for s in buffer.slots), default=never)

        self._filling = max(free, key=needed)
        return self._begin(group, self._filling.cleared())

    def _begin(self, group: BlockGroup, buffer: "Buffer") -> Slot:
        slot = buffer.add(group)
        slot.arrive = self.bus.load(group, slot)
        return slot

    def _unbind(self, group: BlockGroup) -> None:
        for place in group.places:
            key = place.dtype, self._device
            if key not in self._blanks:
                blank = torch.zeros((), dtype=place.dtype, device=self._device)
                if place.dtype.is_floating_point:
                    blank.fill_(torch.nan)
                self._blanks[key] = blank
            place.put(self._blanks[key].expand(place.shape))

    # Weights used outside of their blocks

    @contextmanager
    def watching(self, component: str) -> Iterator[None]:
        """In a component's first forwards, find weights that are used outside of their blocks.

        Their groups are pinned to the device at once, before the use.
        """
        count = self._watched.get(component, 0)
        if count >= WATCHED or component not in self._modules:
            yield
            return
        with _Watch(self):
            yield
        self._watched[component] = count + 1

    def pin(self, group: BlockGroup) -> None:
        """Keep a group on the device from now on."""
        if group in self._pinned:
            return
        log.warning(
            "%s: its weights are used outside of the block: it stays on the device, which costs "
            "%d bytes more", group, group.n_bytes,
        )  # fmt: skip
        slot = self._buffer(group.n_bytes).add(group)
        self.bus.load(group, slot)()
        for place in group.places:
            place.put(place.in_(slot.buffer))
        self._pinned.add(group)

    def group_of(self, tensor: Tensor) -> BlockGroup | None:
        """The group of a weight that is streamed and not on the device; else None."""
        group = self._owners.get(id(tensor))
        if group is None or group in self._pinned:
            return None
        slot = self._of(group)
        return group if slot is None or not slot.users else None

    def remove(self) -> None:
        """Restore the modules' original weights. From any thread, while no forward runs."""
        for group in self.groups:
            whole = torch.empty(group.n_bytes, dtype=torch.uint8)
            self.bus.store.read(group, whole)
            for place in group.places:
                place.put(place.in_(whole))
        for module in self._modules.values():
            unhook(module)
        self.bus.close()
        self._buffers.clear()  # no copies into them are in progress


class _Watch(TorchFunctionMode):
    """Finds weights that are not on the device among the arguments of operations."""

    def __init__(self, streamer: Streamer) -> None:
        super().__init__()
        self._streamer = streamer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _HARMLESS:
            for value in (*args, *kwargs.values()):
                for entry in value if isinstance(value, (list, tuple)) else (value,):
                    group = self._streamer.group_of(entry) if isinstance(entry, Tensor) else None
                    if group is not None:
                        self._streamer.pin(group)
        return func(*args, **kwargs)


_HARMLESS = {"__get__", "__set__", "size", "dim", "stride", "numel", "is_floating_point"}
