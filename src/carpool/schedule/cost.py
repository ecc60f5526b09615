"""Cost model: seconds of a forward by rows, a curve for each kind of call, and overhead of a turn.

A `Curve` is a table that is known (`known_curve.py`); what a server learns from its own forwards is
a `LearnedCurve` (`learned_curve.py`). Both have one interface.

`Costs` has the curves of a model by kind, and what is common to them: how fast the machine is just
now (`speed.py`), and how much may be spent on trying widths (`trials.py`).
"""

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from carpool.schedule.known_curve import Curve as Curve
from carpool.schedule.learned_curve import LearnedCurve
from carpool.schedule.speed import MachineSpeed
from carpool.schedule.trials import FREE, Trials
from carpool.schedule.turn_overhead import TurnOverhead
from carpool.schedule.views import CallKind

SETTLED_EVERY = 256  # forwards: the usual speed follows the speed of now
SETTLED = 0.1  # of the difference
RECENT = 0.999  # of the weight of the forwards before, at each: in `stretch`
LONGEST = 16.0  # times what is usual: more of a forward is not counted there

LEAST_S, MOST_S = 1e-9, 1e6  # of a forward: a nanosecond and twelve days are no measurement
MOST_KINDS = 4096  # that are written and read: to read so many takes a second
MOST_WIDTHS = 1024  # of one kind: a curve of n takes n * n numbers

AnyCurve = Curve | LearnedCurve
_Rows = Annotated[int, Meta(ge=1, le=1 << 30)]
_Seconds = Annotated[float, Meta(ge=LEAST_S, le=MOST_S)]


class Costs:
    """The curves of a model, by kind; learned ones for the kinds that it was not told of."""

    def __init__(self, curves: Mapping[CallKind, AnyCurve] | None = None) -> None:
        self._curves = dict(curves or {})
        self._guesses: dict[CallKind, AnyCurve] = {}  # of kinds that were never run
        self._turns: dict[CallKind, TurnOverhead] = {}
        self._speed = MachineSpeed()
        for curve in self._curves.values():
            if isinstance(curve, LearnedCurve):
                curve.speed = self._speed
        self.trials = Trials()
        self.runs_ahead = False  # a turn's forward runs while the next turn is prepared
        self.streams: dict[str, float] = {}  # seconds of copying a method's weights once
        self._forwards = 0
        self._took_s = self._usual_s = 0.0  # of forwards lately
        self._lock = threading.Lock()  # `to_json` may be asked from any thread

    def learn(self, kind: CallKind, rows: int, seconds: float) -> None:
        """Take notice of a forward; not of one that no curve can have: of no rows, or no time."""
        if rows >= 1 and LEAST_S <= seconds <= MOST_S:
            with self._lock:
                self._learn(kind, rows, seconds)

    def _learn(self, kind: CallKind, rows: int, seconds: float) -> None:
        self._guesses.clear()
        curve = self._curves.get(kind)
        if curve is None:
            curve = self._curves[kind] = LearnedCurve()
            curve.speed = self._speed
        now_s = self.trials.device_s
        self.trials.device_s += seconds
        if isinstance(curve, Curve):
            curve.learn(rows, seconds)
            return
        curve.now_s = now_s
        if curve.has_run(rows):
            usual_s = curve.seconds(rows)
            self._took_s = RECENT * self._took_s + min(seconds, LONGEST * usual_s)
            self._usual_s = RECENT * self._usual_s + usual_s
        elif curve.is_new:
            self.trials.free_s += FREE * seconds
        curve.learn(rows, seconds)
        self._forwards += 1
        if self._forwards >= SETTLED_EVERY and self._speed.is_calm:
            self._forwards = 0
            self._settle()

    def _settle(self) -> None:
        """Take a part of how fast the machine is just now for its usual speed; no cost changes."""
        moved = self._speed.settle(SETTLED)
        for curve in self._curves.values():
            if isinstance(curve, LearnedCurve):
                curve.shift(moved)

    def learn_turn(self, kind: CallKind, calls: int, loop_s: float, own_s: float) -> None:
        """Take notice of what a turn took beside its forward.

        Args:
            calls: of the forward.
            loop_s: what the engine's loop took.
            own_s: what the pipelines' own code took, for all calls.
        """
        if not (calls >= 1 and 0 <= loop_s <= MOST_S and 0 <= own_s <= MOST_S):
            return
        turns = self._turns.setdefault(kind, TurnOverhead())
        turns.learn(loop_s / self._speed.factor, own_s / calls / self._speed.factor)

    def beside_s(self, kind: CallKind, calls: int) -> float:
        """Seconds of a turn of so many calls without its forward, at the usual speed."""
        turns = self._turns.get(kind)
        return turns.seconds(calls) if turns is not None else 0.0

    def turn_s(self, kind: CallKind, calls: int, forward_s: float) -> float:
        """Seconds of a turn of so many calls, of which its forward takes `forward_s`, as usual."""
        beside_s = self.beside_s(kind, calls)
        return max(forward_s, beside_s) if self.runs_ahead else forward_s + beside_s

    def curve(self, kind: CallKind) -> AnyCurve:
        """The kind's own curve, or that of the nearest kind, scaled by size.

        At the machine's usual speed: a busy minute changes no choice between widths.
        """
        known = self._curves.get(kind)
        if known is not None:
            return known
        if kind not in self._guesses:
            self._guesses[kind] = self._guess(kind)
        return self._guesses[kind]

    def _guess(self, kind: CallKind) -> AnyCurve:
        near = self._nearest(kind)
        if near is None:
            return LearnedCurve()
        ratio = max(1, kind.size) / max(1, near.size)  # of no numbers: it takes some time, too
        curve = self._curves[near]
        return type(curve)(
            {n: min(MOST_S, max(LEAST_S, s * ratio)) for n, s in curve.measured.items()}
        )

    def seconds(self, kind: CallKind, rows: int) -> float:
        """Predicted seconds of a forward just now, if nothing shares its streamed weights."""
        compute_s = self.compute_s(kind, rows)
        return max(self.stream_s(kind), compute_s) if self.streams else compute_s

    def usual_s(self, kind: CallKind, rows: int) -> float:
        """Predicted seconds at the machine's usual speed: the unit of remaining work."""
        curve = self._curves.get(kind) or self.curve(kind)
        compute_s = curve.seconds(rows)
        return max(self.stream_s(kind), compute_s) if self.streams else compute_s

    def compute_s(self, kind: CallKind, rows: int) -> float:
        """Predicted seconds of computing a forward just now, without waiting for weights."""
        curve = self._curves.get(kind) or self.curve(kind)
        return curve.seconds(rows) * self._speed.factor

    def stream_s(self, kind: CallKind) -> float:
        """Seconds of copying the streamed weights of a forward once; 0 where they are resident."""
        return self.streams.get(kind.name, 0.0)

    @property
    def factor(self) -> float:
        """Seconds just now, as a multiple of the usual ones."""
        return self._speed.factor

    @property
    def slower(self) -> float:
        """The work of requests just now, as a multiple of the usual one.

        Where weights are streamed requests wait for copies, which are no slower.
        """
        return 1.0 if self.streams else self._speed.factor

    @property
    def stretch(self) -> float:
        """Mean seconds of forwards lately, as a multiple of their usual ones.

        Those are medians: outliers and busy moments, which fill the device, are not in them.
        """
        return self._took_s / self._usual_s if self._usual_s else 1.0

    def _nearest(self, kind: CallKind) -> CallKind | None:
        same = [k for k, c in self._curves.items() if k.name == kind.name and not c.is_empty]
        return min(same, key=lambda k: abs(math.log((k.size + 1) / (kind.size + 1))), default=None)

    def __iter__(self) -> Iterator[tuple[CallKind, AnyCurve]]:
        return iter(self._curves.items())

    def to_json(self) -> list[dict[str, Any]]:
        """All that was learned, as plain data: seconds by rows, with their uncertainty."""
        with self._lock:
            return self._to_json()

    def _to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "name": k.name,
                "size": k.size,
                "detail": k.detail,
                "seconds": c.measured,
                "sd": {rows: c.sd(rows) for rows in c.measured},
                "turn": self._turns[k].to_json() if k in self._turns else None,
            }
            for k, c in list(self._curves.items())[-MOST_KINDS:]
            if c.measured and all(LEAST_S <= seconds <= MOST_S for seconds in c.measured.values())
        ]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]], weight: float | None = None) -> "Costs":
        """Read `to_json`.

        Args:
            weight: runs that an entry stands for, as a prior; None: the table is known to be true.

        Raises:
            ValueError: something else is in it than seconds by rows.
        """
        try:
            entries = convert(data, _Entries, str_keys=True)
        except ValidationError as error:
            raise ValueError(str(error)) from None

        def curve(seconds: Mapping[int, float]) -> AnyCurve:
            return Curve(seconds) if weight is None else LearnedCurve(seconds, weight)

        return cls(
            {CallKind(one.name, one.size, one.detail): curve(one.seconds) for one in entries}
        )


class _Entry(Struct):
    """What was learned of one kind."""

    name: str
    size: Annotated[int, Meta(ge=0, le=1 << 62)]
    seconds: Annotated[dict[_Rows, _Seconds], Meta(max_length=MOST_WIDTHS)]
    detail: str = ""


_Entries = Annotated[list[_Entry], Meta(max_length=MOST_KINDS)]
