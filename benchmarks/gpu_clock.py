"""Time on a device: events on CUDA, whose work goes on after a call returns; a clock elsewhere."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Moment = Any
"""A CUDA event, or seconds of the clock."""


class Marks:
    """Moments in a device's queue of work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    def now(self) -> Moment:
        """The moment when all that was launched so far is done."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_past(self, moment: Moment) -> bool:
        return bool(moment.query()) if self.is_cuda else True

    def between(self, start: Moment, end: Moment) -> float:
        """Seconds; both moments are past."""
        return start.elapsed_time(end) / 1e3 if self.is_cuda else float(end - start)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any], *, min_runs: int = 3, spend_s: float = 0.5) -> float:
        """The median time of some work, done again and again without waiting in between.

        Args:
            work: launches something; done once beforehand, to warm up.
            min_runs: times it is measured.
            spend_s: for so long it is measured, at most 20 times; what takes longer, once.
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
        """Most memory in use since it was asked last; 0 where nobody counts it."""
        if not self.is_cuda:
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak / 2**30


def matmul_tflops(marks: Marks, side: int, dtype: torch.dtype) -> float:
    """What the device's own library reaches with one product of large random matrices."""
    a, b = (torch.randn(side, side, device=marks.device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / marks.seconds(lambda: a @ b, min_runs=10) / 1e12


def union_s(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the spans (begin, end) lasted."""
    total, reached = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
