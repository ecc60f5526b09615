"""Counters of one engine: forwards, waits in the queue, steps per second, missed deadlines.

The counters only grow: the difference of two readings covers the time between them. The heartbeat
of the main loop shows other threads for how long it has been busy with one task.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import nn

from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.observe.timeline import Forward, width_of
from carpool.telemetry.histograms import histogram, statistics_of
from carpool.types import BUCKETS_S, Clock, RequestSize

FORWARD_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, *BUCKETS_S)
PACE_S = 20  # window of the steps per second
KEPT_WAITS = 1000  # newest waits, for median and percentile


class Stats:
    """The counters of one engine. The engine's thread counts; any thread may call `statistics`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began_s = clock, clock()
        self._forwards: Counter[tuple[str, str, int, int]] = Counter()
        self._waits: deque[float] = deque(maxlen=KEPT_WAITS)
        self._queued = histogram(BUCKETS_S)
        self._steps = self._late = self._skipped = self._tokens = 0
        self.turn_s = self.forward_s = self.fiber_s = 0.0  # see `statistics`
        self._paces: deque[tuple[int, int]] = deque(maxlen=PACE_S + 1)  # second, steps before it

    def forward(self, forward: Forward) -> None:
        """An observer of forwards."""
        sizes = len(forward.timelines), width_of(forward.row_counts)
        self._forwards[forward.component, forward.method, *sizes] += 1
        self._tokens += forward.methods.count("generate")

    def start(self, queued_s: float) -> None:
        """Count a request that started to run after `queued_s` in the queue."""
        self._waits.append(queued_s)
        self._queued.observe(queued_s)

    def step(self, now_s: float) -> None:
        """Count a denoising step of a request."""
        second = int(now_s)
        if not self._paces or self._paces[-1][0] != second:
            self._paces.append((second, self._steps))
        self._steps += 1

    def skip(self) -> None:
        """Count a step that reused the request's last answer."""
        self._skipped += 1

    def late(self) -> None:
        """Count a request that ended after its deadline."""
        self._late += 1

    def statistics(self) -> dict[str, Any]:
        """The counters. Durations in seconds.

        `turn_s` is the loop's total busy time; less `forward_s` (modules) and `fiber_s` (the
        pipelines' own code) it is the engine's own overhead.
        """
        waits = sorted(self._waits.copy())
        return {
            "steps": self._steps,
            "steps_skipped": self._skipped,
            "tokens": self._tokens,
            "steps_per_s": self._pace(),
            "deadlines_missed": self._late,
            "turn_s": self.turn_s,
            "forward_s": self.forward_s,
            "fiber_s": self.fiber_s,
            "forwards": [
                {"component": c, "method": m, "requests": requests, "rows": rows, "count": count}
                for (c, m, requests, rows), count in sorted(self._forwards.copy().items())
            ],
            "waits": {
                "requests": len(waits),
                "median_s": _percentile(waits, 0.5),
                "p95_s": _percentile(waits, 0.95),
                "histogram": statistics_of(self._queued),
            },
        }

    def _pace(self) -> float:
        """Steps a second over the last `PACE_S` seconds, or since the start."""
        now_s = self._clock()
        since_s = max(self._began_s, now_s - PACE_S)
        before = [steps for second, steps in self._paces.copy() if second >= since_s - 1]
        over_s = now_s - since_s
        return (self._steps - before[0]) / over_s if before and over_s > 0 else 0.0


@dataclass(slots=True)
class LoopProgress:
    """The start of the loop's current task, and its expected duration.

    On an accelerator the work after a forward may wait for it, so the forward's seconds count until
    the next launch.
    """

    clock: Clock
    _now: tuple[float, float | None] | None = None  # start, and the expected seconds
    _queued_s: float | None = 0.0  # seconds of the forward that may still run on the device
    _before_compiling: float | None = 0.0

    def beat(self, expected_s: float | None = 0.0) -> float:
        """Start a task that is expected to take `expected_s`; None: unknown. Returns the time."""
        queued_s = self._queued_s
        if expected_s is not None:
            expected_s = None if queued_s is None else expected_s + queued_s
        self._now = self.clock(), expected_s
        return self._now[0]

    def progressed(self) -> None:
        """Note that a part of the current task has ended, such as a block of a sweep."""
        if self._now is not None:
            self._now = self.clock(), self._now[1]

    def launched(self, expected_s: float | None) -> None:
        """Note that a forward is queued on the device; all earlier ones have ended."""
        self._queued_s = expected_s

    def compiling(self) -> None:
        """Note that a compilation has started inside the current task: its duration is unknown."""
        self._before_compiling = None if self._now is None else self._now[1]
        self._now = self.clock(), None

    def compiled(self) -> None:
        """Note that the compilation has ended: the task continues."""
        self._now = self.clock(), self._before_compiling

    def idle(self) -> None:
        """Note that the loop is idle."""
        self._now = None

    def read(self) -> tuple[float, float | None]:
        """Seconds since the last beat, 0 when idle; and the expected seconds. From any thread."""
        now = self._now  # read once: the other thread replaces the whole pair
        return (0.0, 0.0) if now is None else (self.clock() - now[0], now[1])


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load of one engine, for the router: costs of steps, and running requests' steps."""

    step_costs: Mapping[RequestSize, list[float]]  # seconds, by number of sharing requests
    text_costs: Mapping[str, tuple[float, list[float]]]  # tokens, and a token's seconds, by writer
    steps_left: Mapping[str, float]  # keyed by request id; tokens for texts
    shares_sweeps: bool  # streamed weights: requests of all sizes share every step
    place_s: float | None  # predicted seconds until the next request can start; None: unknown
    private: Mapping[str, str]  # why requests ride alone, by task


def memory(loaded: LoadedPipeline) -> dict[str, Any]:
    """The device; bytes of the weights, at peak, and reserved by torch."""
    device, modules = loaded.device, loaded.pipe.components.values()
    weights = [p for m in modules if isinstance(m, nn.Module) for p in m.parameters()]
    sizes: dict[str, Any] = {
        "device": str(device.torch),
        "weights_bytes": sum(weight.nbytes for weight in weights),
        "peak_bytes": device.peak_bytes(),
    }
    if (reserved := device.reserved_bytes) is not None:
        sizes["reserved_bytes"] = reserved
    return sizes


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile of sorted values (nearest rank); 0 without values."""
    return ordered[ceil(share * len(ordered)) - 1] if ordered else 0.0
