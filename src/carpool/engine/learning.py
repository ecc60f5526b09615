"""Learn the durations of forwards, and the overhead of the loop and of the pipelines' own code.

Seconds are recorded after each forward and each turn, and learned from in batches: a fit takes as
long for one forward as for many. A batch ends when the forwards of a width have doubled in number,
and after long forwards.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from carpool.engine.admission import AdmissionControl
from carpool.engine.model.stopwatch import Stopwatch
from carpool.engine.observe.stats import FORWARD_BUCKETS_S
from carpool.engine.observe.timeline import Forward, width_of
from carpool.engine.prediction import Predictor
from carpool.schedule.cost import Costs
from carpool.schedule.views import CallKind
from carpool.telemetry.histograms import Histogram, histogram, statistics_of

LEARN_EVERY = 32  # forwards in a batch,
LEARN_EVERY_S = 0.25  # or seconds of forwards in a batch


class CostLearning:
    """Feeds the measured seconds of one engine to its costs. The engine's thread only.

    Args:
        watch: times forwards on the device.
        runs_ahead: forwards end after their launch, and the host does not wait for them.
        streams: weights are streamed: a forward's seconds are not those of compute alone.
    """

    def __init__(
        self,
        costs: Costs,
        admission: AdmissionControl,
        predictor: Predictor,
        watch: Stopwatch,
        *,
        runs_ahead: bool,
        streams: bool,
    ) -> None:
        self.costs, self._admission, self._predictor = costs, admission, predictor
        self.watch, self._runs_ahead, self._streams = watch, runs_ahead, streams
        self._seconds: dict[str, Histogram] = {}  # seconds of forwards, by method
        # not yet learned from: forwards (kind, rows of each call, device seconds), and turns (kind,
        # calls, seconds of the loop and of the pipelines' own code)
        self._ran: list[tuple[CallKind, tuple[int, ...], float]] = []
        self._turns: list[tuple[CallKind, int, float, float]] = []
        self._learned: set[tuple[CallKind, int]] = set()
        self._times_run: Counter[tuple[CallKind, int]] = Counter()
        self._is_news, self._ran_s = False, 0.0

    def expected_s(self, kind: CallKind, rows: int) -> float | None:
        """Predicted seconds of a forward; None if this process never ran one like it.

        The first forward of a width selects, loads or compiles kernels.
        """
        if (kind, width_of([rows])) not in self._learned:
            return None
        return self.costs.seconds(kind, rows)

    def forward(self, kind: CallKind, forward: Forward) -> None:
        """Record a forward's duration; if forwards run ahead, those of completed ones."""
        over = [((kind, forward.row_counts), forward.duration_s)]
        if self._runs_ahead:
            self.watch.stop(over[0][0])
            over = self.watch.read()
        for (ran, widths), seconds in over:
            if ran.name not in self._seconds:
                self._seconds[ran.name] = histogram(FORWARD_BUCKETS_S)
            self._seconds[ran.name].observe(seconds)
            self._ran.append((ran, widths, seconds))
            self._ran_s += seconds
            source = ran, width_of(widths)
            self._times_run[source] = times = self._times_run[source] + 1
            self._is_news |= times & (times - 1) == 0

    def turn(
        self, kind: CallKind, calls: int, loop_s: float, fiber_s: float, longest_s: float
    ) -> None:
        """Record a turn's overhead outside its forward.

        If forwards run ahead, the first pipeline that reads from the device waits for the
        forward, so the longest stretch is left out.

        Args:
            loop_s: seconds of the loop.
            fiber_s: seconds of the pipelines' own code, for all calls.
            longest_s: the longest of these, for one call.
        """
        if self._runs_ahead and calls > 1:
            fiber_s = (fiber_s - longest_s) * calls / (calls - 1)
        if not self._runs_ahead or calls > 1:
            self._turns.append((kind, calls, max(0.0, loop_s), fiber_s))
        if self._is_news or self._ran_s >= LEARN_EVERY_S or len(self._ran) >= LEARN_EVERY:
            self.learn()

    def sweep(self, calls: Sequence[tuple[CallKind, int]], seconds: float) -> None:
        """Learn the speedup of a sweep over streamed weights against lone calls.

        Args:
            calls: kind and rows of each call.
            seconds: predicted seconds of the sweep.
        """
        if self._is_informed:
            alone_s = sum(self.costs.seconds(kind, rows) for kind, rows in calls)
            self._admission.learn(alone_s, len(calls), seconds)

    def learn(self) -> None:
        """Learn from the recorded forwards and turns."""
        runs: dict[tuple[CallKind, tuple[int, ...]], list[float]] = {}
        for kind, rows, seconds in self._ran:
            runs.setdefault((kind, rows), []).append(seconds)
        for (kind, rows), times_s in runs.items():
            self.costs.learn(kind, width_of(rows), *times_s)
            self._learned.add((kind, width_of(rows)))
            if not self._streams and self._is_informed:
                curve = self.costs.curve(kind)
                alone_s, together_s = sum(map(curve.seconds, rows)), curve.seconds(sum(rows))
                self._admission.learn(alone_s, len(rows), together_s, len(times_s))
        turns: dict[tuple[CallKind, int], list[tuple[float, float]]] = {}
        for kind, calls, loop_s, fiber_s in self._turns:
            turns.setdefault((kind, calls), []).append((loop_s, fiber_s))
        for (kind, calls), parts_s in turns.items():
            self.costs.learn_turns(kind, calls, parts_s)
        self._ran.clear()
        self._turns.clear()
        self._is_news, self._ran_s = False, 0.0

    @property
    def _is_informed(self) -> bool:
        return self._admission.is_informed or self._predictor.is_proven

    def statistics(self) -> list[dict[str, Any]]:
        """Seconds of forwards, by method."""
        return [
            {"component": component, "histogram": statistics_of(statistics)}
            for component, statistics in sorted(self._seconds.copy().items())
        ]
