"""Streamed weights with fixed times of copying and computing, valid on a busy machine too.

Models with the blocks of FLUX.1-dev (19 with 340 million weights, 38 with 141 million, which
compute about as long) and of Qwen-Image (60 equal ones), each block a few bytes. A block computes
by sleeping, as a host waits for a device; a copy sleeps too, in the thread that reads weights. The
engine's own code decides what is streamed, when it is copied, and all waits. Between sweeps fibers
run for 2 % of the compute time.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.stream_bus import HeldBus
from carpool.engine.weights.backing_store import DiskStore
from carpool.engine.weights.groups import blocks_of
from carpool.engine.weights.residency import SLOTS, Component, plan
from carpool.engine.weights.streaming import Streamer

CPU = torch.device("cpu")
MODELS = {
    "FLUX.1-dev": [340] * 19 + [141] * 38,
    "Qwen-Image": [340] * 60,
}
"""Millions of weights of each block."""
RESIDENT = (0.0, 0.2, 0.5)  # fraction of the weights on the device
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)  # copying the streamed blocks once, relative to computing
BLOCK_S = 0.02  # compute time of a block
BETWEEN = 0.02  # time of fibers, relative to computing a sweep
SWEEPS = 3


class Block(nn.Module):
    """A block of a few bytes that sleeps."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64 * size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(BLOCK_S)
        answer: Tensor = x * self.weight[0]
        return answer


class Model(nn.Module):
    """Blocks in sequence."""

    blocks: Any

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, sizes))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def measure(folder: Path) -> Iterator[str]:
    """A table, by lines."""
    yield "| model | weights that stay | copying: of computing | of the bound | bus busy |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, sizes in MODELS.items():
        for resident in RESIDENT:
            for share in SHARES:
                seconds, stream_s, compute_s = _sweep_s(sizes, resident, share, folder)
                bound = max(stream_s, (1 + BETWEEN) * compute_s) / seconds
                yield (
                    f"| {name} | {100 * resident:.0f} % | {share:g} | {bound:.2f} "
                    f"| {stream_s / seconds:.0%} |"
                )


def _sweep_s(
    sizes: Sequence[int], resident: float, share: float, folder: Path
) -> tuple[float, float, float]:
    """Seconds of a sweep, of its copies, and of computing alone."""
    model, x = Model(sizes), torch.ones(1)
    before_s = _resident_s(model, x)
    block_bytes = [block.weight.nbytes for block in model.blocks]
    streamed: Any = range(len(sizes))
    if resident:
        budget = int(resident * sum(block_bytes)) + SLOTS * max(block_bytes)
        component = Component("transformer", 0, tuple(block_bytes), is_denoiser=True)
        streamed = plan([component], "auto", budget).streamed["transformer"]
    paths = [path for i, path in enumerate(blocks_of(model)) if i in streamed]
    bus = HeldBus(DiskStore(folder, 1), CPU)
    streamer = Streamer({"transformer": model}, {"transformer": paths}, CPU, bus)
    stream_s = share * before_s
    bus.hold_to(streamer.bytes_of("transformer") / stream_s)
    durations = []
    try:
        for _ in range(SWEEPS + 1):
            began_s = time.monotonic()
            if not model(x).isfinite().all():
                raise SystemExit("a block computed before its weights were there")
            time.sleep(BETWEEN * before_s)
            durations.append(time.monotonic() - began_s)
    finally:
        streamer.remove()
    return statistics.median(durations[1:]), stream_s, (before_s + _resident_s(model, x)) / 2


def _resident_s(model: Model, x: Tensor) -> float:
    """Measured compute seconds of a sweep: each sleep is slightly too long."""
    began_s = time.monotonic()
    model(x)
    return time.monotonic() - began_s
