"""Observe forwards: compare fused with single calls; measure seconds and memory."""

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from carpool.engine.execute import RunCalls
from carpool.engine.model.device import Device
from carpool.engine.nested import tensors_in
from carpool.engine.request import RequestState
from carpool.types import Phase


@dataclass(slots=True)
class ObservedCalls:
    """Observations of the calls of one method of a component."""

    phase: Phase
    class_name: str
    max_requests: int = 1  # most requests in a forward
    compared: int = 0  # compared forwards with several requests
    difference: float = 0.0  # maximum over all numbers, against single calls
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by rows
    bytes: dict[int, int] = field(default_factory=dict)  # by rows, without weights and inputs
    too_wide: int | None = None  # rows that did not fit the memory

    @property
    def row_bytes(self) -> int | None:
        """Bytes for each additional row; None if only one width was measured."""
        low, high = min(self.bytes, default=0), max(self.bytes, default=0)
        if low == high:
            return None
        return round((self.bytes[high] - self.bytes[low]) / (high - low))

    def usual_s(self) -> dict[int, float]:
        """Median seconds by rows, without the first forward, which allocates memory."""
        return {n: median(s[1:]) for n, s in sorted(self.seconds.items()) if len(s) > 1}


class ForwardChecker:
    """Also runs the calls of every shared forward separately, and compares.

    Args:
        measures: time forwards, and measure their memory once for each number of rows.
    """

    def __init__(self, device: Device, *, measures: bool) -> None:
        self._device, self._measures = device, measures
        self.methods: dict[str, ObservedCalls] = {}  # "transformer.forward"

    def around(self, run: RunCalls) -> RunCalls:
        """Run a forward and observe it; see `EngineCore`."""

        def watched(states: Sequence[RequestState]) -> list[Any]:
            target = states[0].call.target
            calls = self.methods.setdefault(
                f"{target.component}.{target.method}",
                ObservedCalls(target.phase, type(target.module).__name__),
            )
            rows = sum(state.rows for state in states)
            try:
                if self._measures and rows not in calls.bytes:
                    with allocated(self._device) as peak:
                        run(states)
                    calls.bytes[rows] = peak[0]
                began_s = time.perf_counter()
                answers = run(states)
                self._device.synchronize()
            except torch.OutOfMemoryError:
                calls.too_wide = min(rows, calls.too_wide or rows)
                raise
            calls.seconds[rows].append(time.perf_counter() - began_s)
            if len(states) > 1:
                calls.max_requests = max(calls.max_requests, len(states))
                calls.compared += 1
                for state, together in zip(states, answers, strict=True):
                    calls.difference = max(calls.difference, apart(together, run([state])[0]))
            return answers

        return watched


def apart(first: Any, second: Any) -> float:
    """The maximum difference over all numbers of two answers; infinite if shapes differ."""
    pairs = list(tensors_in(first)), list(tensors_in(second))
    if [a.shape for a in pairs[0]] != [b.shape for b in pairs[1]]:
        return float("inf")
    return max((_gap(a, b) for a, b in zip(*pairs, strict=True)), default=0.0)


def _gap(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    a, b = a.double(), b.to(a.device).double()
    is_equal = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(is_equal, 0).nan_to_num(nan=torch.inf).max())


@contextmanager
def allocated(device: Device) -> Iterator[list[int]]:
    """Measure the peak of torch's memory in the block, relative to its start."""
    peak: list[int] = []
    if (before := device.allocated_bytes) is not None:
        device.synchronize()
        device.reset_peak()
        yield peak
        device.synchronize()
        peak.append(device.peak_bytes() - before)
        return
    with _Allocations() as counted:
        yield peak
    peak.append(counted.peak)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations make, until they are freed.

    CPUs have no allocator statistics. Temporary memory inside an operation is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = {x.untyped_storage().data_ptr() for x in tensors_in([args, kwargs])}
        answer = func(*args, **(kwargs or {}))
        for tensor in tensors_in(answer):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in inputs and storage not in self._counted:
                self._counted.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return answer

    def _free(self, count: int) -> None:
        self.now -= count
