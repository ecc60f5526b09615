"""A model of a few blocks, a bus that takes virtual time, a policy that makes forwards narrow."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carpool.engine.weights.backing_store import DiskStore
from carpool.engine.weights.bus import Bus, Slot
from carpool.engine.weights.groups import BlockGroup, blocks_of
from carpool.engine.weights.streaming import Streamer
from carpool.schedule.views import Choice, ParkedCall
from support.engine_driver import Drive, InLine, VirtualClock

CPU = torch.device("cpu")


class Block(nn.Module):
    """A linear layer; `on_forward` is told of every run."""

    linear: Any

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.on_forward: Callable[[Tensor], object] = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward(x)
        return torch.tanh(self.linear(x))


class Tower(nn.Module):
    """Blocks one after the other, between two layers that belong to none."""

    before: Any
    blocks: Any
    after: Any

    def __init__(self, blocks: int = 4, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.after = nn.Linear(width, width)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        answer: Tensor = self.after(x)
        return answer


class Profile(nn.Module):
    """Blocks of given bytes that compute for given virtual seconds."""

    blocks: Any

    def __init__(self, clock: VirtualClock, blocks: Sequence[tuple[int, float]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Timed(clock, *block) for block in blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Timed(nn.Module):
    def __init__(self, clock: VirtualClock, n_bytes: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_bytes // 4), requires_grad=False)
        self._clock, self._seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self._clock.pass_by(self._seconds)
        return x * self.weight[0]  # NaN if it is not there


class VirtualBus(Bus):
    """Loads at so many bytes a virtual second, one group after the other."""

    def __init__(self, folder: Path, clock: VirtualClock, bytes_per_s: float) -> None:
        super().__init__(DiskStore(folder, 1), CPU, clock)
        self._virtual, self._speed, self._free_s = clock, bytes_per_s, 0.0

    def load(self, group: BlockGroup, slot: Slot) -> Callable[[], object]:
        self.moved_bytes += group.n_bytes
        self.loads += 1
        self._free_s = max(self._free_s, self._virtual()) + group.n_bytes / self._speed
        there_s = self._free_s

        def arrive() -> None:
            self._virtual.now_s = max(self._virtual(), there_s)
            self.store.read(group, slot.buffer)

        return arrive

    def seconds_a_byte(self) -> float:
        return 1 / self._speed


def streamed(model: nn.Module, folder: Path, bus: Bus | None = None) -> Streamer:
    """All blocks of a model streamed from the disk."""
    return Streamer(
        {"tower": model},
        {"tower": list(blocks_of(model))},
        CPU,
        bus or Bus(DiskStore(folder, 1), CPU),
    )


class OneEach(InLine):
    """Every call has a forward of its own, whatever may fuse with it: encoders first."""

    def choose(self, parked: Sequence[ParkedCall], *_: Any, **__: Any) -> Choice:
        if not parked:
            return Choice(())
        return Choice((min(parked, key=lambda call: (call.phase == "denoise", call.order)),))


def on_a_slow_bus(drive: Drive, policy: Any = None) -> None:
    """Let copies seem to take so long that whatever may share a sweep does."""
    drive.engine.loaded.streamer.bus.seconds_a_byte = lambda: 1.0  # type: ignore
    if policy is not None:
        drive.engine.scheduler._policy = policy
