"""Costs of a model: a learned curve for each kind of call (`estimator.py`), and turn overhead.

The baseline is the usual duration of forwards; `seconds` is the current one. Remaining work is
predicted at the baseline, so that a busy minute does not reorder requests.
"""

import math
import statistics
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import exp, inf
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from carpool.schedule.estimator import RECENT, MachineSpeed
from carpool.schedule.estimator import Curve as Curve
from carpool.schedule.views import CallKind

LOAD_MEMORY = 1000  # forwards over which `load_ratio` is a mean; arrivals that are remembered
SECONDS = (1e-9, 1e6)  # seconds outside this range, of a forward, are no measurement

_Rows = Annotated[int, Meta(ge=1, le=1 << 30)]
_Seconds = Annotated[float, Meta(ge=SECONDS[0], le=SECONDS[1])]


def _empty() -> deque[float]:
    return deque(maxlen=RECENT)


@dataclass(slots=True)
class TurnOverhead:
    """The overhead of a kind's turns outside their forwards: a fixed part, and a part a call.

    Calls that share a turn share the fixed part; that matters for short forwards. Each part is the
    median of the last turns.
    """

    _loop: deque[float] = field(default_factory=_empty)
    _samples: deque[float] = field(default_factory=_empty)  # seconds per call
    _until: int = 0  # turns until the medians are recomputed
    loop_s: float = 0.0
    own_s: float = 0.0

    def learn(self, loop_s: float, own_s: float) -> None:
        """Record a turn; `own_s` is per call."""
        self._loop.append(loop_s)
        self._samples.append(own_s)
        self._until -= 1
        if self._until <= 0:
            self.loop_s = statistics.median(self._loop)
            self.own_s = statistics.median(self._samples)
            self._until = min(RECENT // 3, len(self._loop))

    def seconds(self, calls: int) -> float:
        return self.loop_s + calls * self.own_s

    def to_json(self) -> dict[str, Any]:
        return {"loop_s": self.loop_s, "own_s": self.own_s}


class Costs:
    """The curves of a model, by kind; further kinds are learned as they run."""

    def __init__(self, curves: Mapping[CallKind, Curve] | None = None) -> None:
        self._curves = dict(curves or {})
        self._guesses: dict[CallKind, Curve] = {}  # kinds that never ran
        self._turns: dict[CallKind, TurnOverhead] = {}
        self._speed = MachineSpeed()
        for curve in self._curves.values():
            curve.speed = self._speed
        self.runs_ahead = False  # a turn's forward runs while the next turn is prepared
        self.streams: dict[str, float] = {}  # seconds of copying a method's weights once
        self._measured_s = self._baseline_s = 0.0  # moving sums over recent forwards
        self._lock = threading.Lock()  # any thread may call `to_json`

    def learn(self, kind: CallKind, rows: int, *seconds: float) -> None:
        """Learn from forwards; ignore impossible durations."""
        times_s = [s for s in seconds if SECONDS[0] <= s <= SECONDS[1]]
        if rows < 1 or not times_s:
            return
        with self._lock:
            self._guesses.clear()
            curve = self._curves.get(kind)
            if curve is None:
                curve = self._curves[kind] = Curve()
                curve.speed = self._speed
            if curve.has_run(rows):
                baseline_s, decay = curve.seconds(rows), 1 - 1 / LOAD_MEMORY
                for time_s in times_s:
                    self._baseline_s = decay * self._baseline_s + baseline_s
                    # cap outliers: an hour-long forward does not mean a full device
                    self._measured_s = decay * self._measured_s + min(time_s, 16 * baseline_s)
            curve.learn(rows, *times_s)

    def learn_turns(
        self, kind: CallKind, calls: int, parts_s: Iterable[tuple[float, float]]
    ) -> None:
        """Learn the overhead of turns.

        Args:
            calls: number of calls of each forward.
            parts_s: seconds of the engine's loop, and of the pipelines' code for all calls.
        """
        if (turns := self._turns.get(kind)) is None:
            turns = self._turns[kind] = TurnOverhead()
        factor = exp(self._speed.slowdown)
        for loop_s, own_s in parts_s:
            if calls >= 1 and 0 <= loop_s <= SECONDS[1] and 0 <= own_s <= SECONDS[1]:
                turns.learn(loop_s / factor, own_s / calls / factor)

    def overhead_s(self, kind: CallKind, calls: int) -> float:
        """Baseline seconds of a turn of `calls` calls without its forward."""
        return turns.seconds(calls) if (turns := self._turns.get(kind)) else 0.0

    def turn_s(self, kind: CallKind, calls: int, forward_s: float) -> float:
        """Baseline seconds of a turn of `calls` calls with a forward of `forward_s`."""
        overhead_s = self.overhead_s(kind, calls)
        return max(forward_s, overhead_s) if self.runs_ahead else forward_s + overhead_s

    def curve(self, kind: CallKind) -> Curve:
        """The kind's own curve, at the baseline, or the nearest kind's curve, scaled by size."""
        curve = self._curves.get(kind) or self._guesses.get(kind)
        if curve is None:
            curve = self._guesses[kind] = self._guess(kind)
        return curve

    def _guess(self, kind: CallKind) -> Curve:
        near = self._nearest(kind)
        if near is None:
            return Curve()
        ratio = max(1, kind.size) / max(1, near.size)  # a kind without tensors takes time, too
        curve, (low_s, high_s) = self._curves[near], SECONDS
        scaled = {n: min(high_s, max(low_s, s * ratio)) for n, s in curve.measured.items()}
        return Curve(scaled, curve.weight or 1.0)

    def _nearest(self, kind: CallKind) -> CallKind | None:
        candidates = [k for k, c in self._curves.items() if k.name == kind.name and not c.is_empty]
        return min(
            candidates, key=lambda k: abs(math.log((k.size + 1) / (kind.size + 1))), default=None
        )

    def seconds(self, kind: CallKind, rows: int) -> float:
        """Predicted current seconds of a forward that shares its streamed weights with no other."""
        if not self.streams:
            return self.curve(kind).seconds(rows) * exp(self._speed.slowdown)
        return max(self.stream_s(kind), self.compute_s(kind, rows))

    def baseline_s(self, kind: CallKind, rows: int) -> float:
        """Like `seconds`, at the machine's usual speed: the unit of remaining work."""
        if not self.streams:
            return self.curve(kind).seconds(rows)
        return max(self.stream_s(kind), self._baseline_compute_s(kind, rows))

    def compute_s(self, kind: CallKind, rows: int) -> float:
        """Predicted current seconds of compute of a forward, without waiting for weights."""
        return self._baseline_compute_s(kind, rows) * exp(self._speed.slowdown)

    def _baseline_compute_s(self, kind: CallKind, rows: int) -> float:
        """0 for streamed weights until the kind has run: the copies take longer than compute."""
        curve = self.curve(kind)
        return 0.0 if self.stream_s(kind) and curve.is_empty else curve.seconds(rows)

    def stream_s(self, kind: CallKind) -> float:
        """Seconds to copy the streamed weights of a forward once; 0 for resident weights."""
        return self.streams.get(kind.name, 0.0)

    @property
    def slowdown(self) -> float:
        """Current seconds of work as a multiple of the baseline; 1 with streamed weights, whose
        copies do not slow down."""
        return 1.0 if self.streams else exp(self._speed.slowdown)

    @property
    def load_ratio(self) -> float:
        """Mean seconds of recent forwards, as a multiple of the baseline.

        The baseline is a median: it leaves out outliers and busy moments, which load the device.
        """
        return self._measured_s / self._baseline_s if self._baseline_s else 1.0

    def __iter__(self) -> Iterator[tuple[CallKind, Curve]]:
        return iter(self._curves.items())

    def to_json(self) -> list[dict[str, Any]]:
        """All that was learned, as plain data: seconds by rows, with their uncertainty."""
        with self._lock:
            return [
                {
                    "name": k.name,
                    "size": k.size,
                    "detail": k.detail,
                    "seconds": c.measured,
                    "sd": {rows: c.sd(rows) for rows in c.measured},
                    "turn": self._turns[k].to_json() if k in self._turns else None,
                }
                for k, c in list(self._curves.items())[-4096:]  # the limit of `_Entries`
                if c.measured and all(map(_is_measurement, c.measured.values()))
            ]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]], weight: float | None = None) -> "Costs":
        """Read `to_json`.

        Args:
            weight: see `Curve`; None: the table is exact.

        Raises:
            ValueError: it holds anything but seconds by rows.
        """
        try:
            entries = convert(data, _Entries, str_keys=True)
        except ValidationError as error:
            raise ValueError(str(error)) from None
        return cls(
            {
                CallKind(entry.name, entry.size, entry.detail): Curve(
                    entry.seconds, inf if weight is None else weight
                )
                for entry in entries
            }
        )


def _is_measurement(seconds: float) -> bool:
    return SECONDS[0] <= seconds <= SECONDS[1]


class _Entry(Struct):
    """The learned costs of one kind."""

    name: str
    size: Annotated[int, Meta(ge=0, le=1 << 62)]
    seconds: Annotated[dict[_Rows, _Seconds], Meta(max_length=1024)]  # widths
    detail: str = ""


_Entries = Annotated[list[_Entry], Meta(max_length=4096)]  # kinds: reading this many takes a second
