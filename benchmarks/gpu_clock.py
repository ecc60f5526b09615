"""Time on a device: events on CUDA, which runs asynchronously; otherwise a clock."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Moment = Any
"""A CUDA event, or clock seconds."""


class Marks:
    """Points in a device's queue of work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    def now(self) -> Moment:
        """The point after all launched work."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_past(self, moment: Moment) -> bool:
        return bool(moment.query()) if self.is_cuda else True

    def between(self, start: Moment, end: Moment) -> float:
        """Seconds between two past points."""
        return start.elapsed_time(end) / 1e3 if self.is_cuda else float(end - start)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any], *, min_runs: int = 3, spend_s: float = 0.5) -> float:
        """The median time of work that is launched repeatedly, without waits in between.

        Args:
            work: launches work; runs once before, as a warm-up.
            min_runs: minimum number of measured runs.
            spend_s: time for up to 20 runs; longer work runs once.
        """
        work()
        self.wait()
        first = self._timed(work)
        if first > spend_s:
            return first
        times = max(min_runs, min(20, int(spend_s / max(first, 1e-9))))
        moments = [self.now()]
        for _ in range(times):
            work()
            moments.append(self.now())
        self.wait()
        return statistics.median(map(self.between, moments, moments[1:]))

    def _timed(self, work: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin

    def peak_gib(self) -> float:
        """Peak memory since the last call; 0 if the device does not report it."""
        if not self.is_cuda:
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak / 2**30


def matmul_tflops(marks: Marks, side: int, dtype: torch.dtype) -> float:
    """TFLOP/s of the device's library for one product of large random matrices, as in layers."""
    a, b = (torch.randn(side, side, device=marks.device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / marks.seconds(lambda: a @ b.T, min_runs=10) / 1e12


def union_s(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of the spans (begin, end)."""
    total, reached = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
