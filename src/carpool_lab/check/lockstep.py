"""A policy for measurements: equal requests run in lockstep, all in every forward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from carpool.engine.model.device import Device
from carpool.engine.observe.timeline import Forward
from carpool.engine.request import Outcome
from carpool.schedule.batch_modes import together
from carpool.schedule.cost import Costs, Curve
from carpool.schedule.views import NO_KIND, Admission, CallKind, Choice, ParkedCall, QueuedRequest
from carpool.types import Event, Phase


@dataclass(slots=True)
class CallStats:
    """The calls and forwards of one kind at one size."""

    phase: Phase
    rows: int
    calls: int = 0
    tried: set[int] = field(default_factory=set)  # rows of started forwards
    finished: set[int] = field(default_factory=set)  # rows of successful forwards
    peak_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def too_wide(self) -> int | None:
        return min(self.tried - self.finished, default=None)


class OutcomeListener:
    """Stores the outcome of a request, and whether it has made a step."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.has_begun = False

    def event(self, event: Event) -> None:
        self.has_begun |= event.kind == "step" and event.step > 0

    def done(self, outcome: Outcome) -> None:
        self.outcome, self.has_begun = outcome, True

    @property
    def error(self) -> Exception | None:
        """The error of the request.

        Raises:
            KeyboardInterrupt: the user interrupted the command while the request ran.
        """
        error = None if self.outcome is None else self.outcome.error
        if error is not None and isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__
        return error


class Lockstep:
    """Admits all requests at once and fuses equal calls, oldest first; records the forwards."""

    def __init__(self, device: Device) -> None:
        self._device, self._kind = device, NO_KIND
        self.stats: dict[CallKind, CallStats] = {}

    def admit(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> Admission:
        return Admission(tuple(entry.request for entry in waiting))

    def choose(
        self,
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        all_parked: Sequence[ParkedCall] | None = None,
    ) -> Choice:
        choice = together(parked)
        if choice.calls:
            first = choice.calls[0]
            self._kind = first.kind
            stats = self.stats.setdefault(first.kind, CallStats(first.phase, first.rows))
            stats.calls += len(choice.calls)
            stats.tried.add(sum(call.rows for call in choice.calls))
            self._device.reset_peak()
        return choice

    def ran(self, forward: Forward) -> None:
        """Record a forward; the engine's `on_forward`."""
        stats = self.stats[self._kind]
        stats.finished.add(forward.rows)
        if self._device.is_accelerator:
            peak = max(stats.peak_bytes.get(forward.rows, 0), self._device.peak_bytes())
            stats.peak_bytes[forward.rows] = peak


class MedianCurve(Curve):
    """A curve that reports the medians of all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[int, list[float]] = {}  # seconds by rows

    def learn(self, rows: int, *seconds: float) -> None:
        self.samples.setdefault(rows, []).extend(seconds)
        super().learn(rows, *seconds)

    @property
    def measured(self) -> dict[int, float]:
        return {rows: median(seconds) for rows, seconds in sorted(self.samples.items())}


class WarmCosts(Costs):
    """Medians of each width, without its first forward, which is a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self._warm: set[tuple[CallKind, int]] = set()
        self.curves: dict[CallKind, MedianCurve] = {}

    def learn(self, kind: CallKind, rows: int, *seconds: float) -> None:
        warm = seconds if (kind, rows) in self._warm else seconds[1:]
        if warm:
            self._curves[kind] = self.curves.setdefault(kind, MedianCurve())
            super().learn(kind, rows, *warm)
        self._warm.add((kind, rows))
