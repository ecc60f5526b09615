"""Where the loop asks who comes aboard and who rides in the next forward.

Here the policy gets what it may see, and here is learned what forwards take.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any

from carpool.config import EngineSettings
from carpool.engine.admission import Gate
from carpool.engine.cost_store import Table
from carpool.engine.execute import Widths
from carpool.engine.fuse import decode_bytes
from carpool.engine.model.device import Stopwatch
from carpool.engine.model.load import Loaded
from carpool.engine.observe.stats import FORWARD_BUCKETS_S, Histogram
from carpool.engine.observe.width_reason import not_wider
from carpool.engine.prediction import Forecast
from carpool.engine.queue import Line
from carpool.engine.request import Rider
from carpool.errors import TooLate
from carpool.schedule.cost import Costs
from carpool.schedule.peers.sglang_metrics import Dispatches
from carpool.schedule.policy import Policy, build, reload
from carpool.types import NO_KIND, CheckedRequest, Clock, ParkedCall, QueuedRequest

log = logging.getLogger("carpool")

KEEP_EVERY_S = 30.0


class Desk:
    """The engine's scheduling. Only its thread asks; what refuses may be called from any."""

    def __init__(
        self,
        loaded: Loaded,
        settings: EngineSettings,
        line: Line,
        clock: Clock,
        table: Table | None,
        policy: Policy | None,
    ) -> None:
        self._settings, self._line, self._clock = settings, line, clock
        self._table, self._kept_s = table, clock()
        self.costs = table.costs if table else Costs()
        self.widths = Widths()
        self._forecast = Forecast(loaded.card, self.costs, loaded.vae_scale_px)
        self._dispatches = Dispatches()
        say = partial(log.info, "%s") if settings.enable_batching_metrics else _ignore
        self._server, self._is_cuda = loaded.server, loaded.device.is_cuda
        self._policy = policy or build(settings, self.costs, self._server, self._dispatches, say)
        self._watch, self._kind = Stopwatch(loaded.device), NO_KIND
        self.gate = Gate(line, settings)
        self._waiting: list[QueuedRequest] = []  # of the line, as of its `_version`
        self._version, self._waiting_s = -1, 0.0
        self.wake_s = inf  # when to ask again, if nothing happens before
        self._why: Counter[tuple[str, str]] = Counter()  # forwards were not wider
        self._seconds: dict[str, Histogram] = {}  # of forwards, by their method

    def admitted(self, aboard: int) -> list[Rider]:
        """Take those who come aboard now out of the line; none when all are that may."""
        self._version, line = self._line.waiting(since=self._version)
        if line is not None:
            for rider in line:
                rider.waiting = rider.waiting or self._forecast.waiting(rider)
            self._waiting = [rider.waiting for rider in line if rider.waiting is not None]
            self._waiting_s = sum(one.left_s for one in self._waiting)
        admission = self._policy.admit(self._waiting, aboard, self._clock())
        self.wake_s = admission.wake_s
        return self._line.take(set(admission.requests)) if admission.requests else []

    def chosen(self, riders: Collection[Rider]) -> list[Rider]:
        """Those whose calls make the next forward, in the order in which they are stacked."""
        parked = [self._parked(rider) for rider in riders]
        self.gate.look(len(self._waiting), self._waiting_s, [one.left_s for one in parked])
        choice = self._policy.choose(parked, self._waiting_s, self._clock())
        if not choice.calls:
            return []
        self._kind = choice.calls[0].kind
        self._why[self._kind.name, not_wider(choice, parked)] += 1
        numbers = {call.request for call in choice.calls}
        # who rides with the same adapter, side by side; else a stable order: stacks are reused
        return sorted(
            (rider for rider in riders if rider.number in numbers),
            key=lambda rider: (rider.job.lora, rider.number),
        )

    def _parked(self, rider: Rider) -> ParkedCall:
        ready = rider.ready
        assert ready is not None, "a rider in flight is always parked between turns"
        settings, phase = self._settings, ready.call.target.phase
        most = settings.max_decode_size if phase == "decode" else settings.max_batch_size
        if row_bytes := decode_bytes(ready.call):
            most = max(1, min(most, int(settings.max_decode_gib * 2**30 // row_bytes)))
        cap = self.widths.cap(ready.key, most)
        if rider.parked is None or rider.parked.max_rows != cap:
            rider.parked = self._forecast.parked(rider, ready, cap)
        return rider.parked

    def expected_s(self, rows: Sequence[int]) -> float | None:
        """What a forward of those chosen is likely to take; None if nothing like it ever ran."""
        if self.costs.curve(self._kind).is_empty:
            return None
        return self.costs.seconds(self._kind, sum(rows))

    def began(self) -> None:
        """A forward of those chosen begins."""
        self._watch.start()

    def ended(self, rows: Sequence[int], duration_s: float) -> None:
        """Learn what it took; on CUDA, what those took that are over by now."""
        self._watch.stop((self._kind, sum(rows)), duration_s)
        for (kind, width), seconds in self._watch.read():
            if kind.name not in self._seconds:
                self._seconds[kind.name] = Histogram(FORWARD_BUCKETS_S)
            self._seconds[kind.name].add(seconds)
            if seconds > 0:
                self.costs.learn(kind, width, seconds)
        if self.gate.is_informed or self._forecast.is_proven:
            curve = self.costs.curve(self._kind)
            alone_s = sum(curve.seconds(width) for width in rows)
            self.gate.learn(alone_s, len(rows), curve.seconds(sum(rows)))

    def turned(self, calls: int, loop_s: float, fiber_s: float) -> None:
        """Learn what a turn took beside its forward; on CUDA that runs beside it, and is free.

        Args:
            loop_s: what the loop took.
            fiber_s: what the pipelines' own code took, for all calls.
        """
        if not self._is_cuda:
            self.costs.learn_turn(self._kind, calls, max(0.0, loop_s), fiber_s)

    def refuse_overload(self, job: CheckedRequest) -> None:
        """Refuse a request that would wait too long; see `Gate.check` for what it raises."""
        self.gate.check(job.priority, self._forecast.whole_s(job))

    def refuse_late(self, job: CheckedRequest, aboard: Iterable[Rider]) -> None:
        """Refuse a request that cannot be done in time, by what forwards have taken so far.

        That is what it takes alone, after those aboard whose deadlines are earlier.

        Raises:
            TooLate: says what it would take. With `admit_late` that is a line in the log.
        """
        if job.deadline_s is None or not self._forecast.is_informed:
            return
        due_s = self._clock() + job.deadline_s
        before = [rider.parked for rider in aboard]
        ahead_s = sum(one.left_s for one in before if one and one.deadline_s <= due_s)
        needed_s = self._forecast.whole_s(job) + ahead_s
        if needed_s <= job.deadline_s:
            return
        late = f"deadline_s={job.deadline_s:g} cannot be met: it would take {needed_s:.3g} s"
        if not self._settings.admit_late:
            raise TooLate(f"{late}; ask for fewer steps or a smaller size", param="deadline_s")
        log.warning("request %s: %s", job.request_id, late)

    def wait(self) -> None:
        """Sleep until the line changes or a batch that waits is due."""
        self.keep(at_most_every_s=KEEP_EVERY_S)
        self._line.wait(self._version, self.wake_s)

    def reload(self) -> None:
        """Read the batching config again, from any thread; see `schedule.policy.reload`."""
        reload(self._policy, self._settings, self._server)

    def keep(self, at_most_every_s: float = 0.0) -> None:
        """Write down what was learned."""
        if self._table is not None and self._clock() - self._kept_s >= at_most_every_s:
            self._table.keep()
            self._kept_s = self._clock()

    def statistics(self) -> dict[str, Any]:
        """Why forwards were not wider, what they took and take, and batches of `dynamic`."""
        return {
            "waiting_work_s": self._waiting_s,
            "overload": self.gate.to_json(),
            "not_wider": [
                {"component": component, "why": why, "count": count}
                for (component, why), count in sorted(self._why.copy().items())
            ],
            "seconds": [
                {"component": component, "histogram": one.to_json()}
                for component, one in sorted(self._seconds.copy().items())
            ],
            "costs": self.costs.to_json(),
            "speed_factor": self.costs.factor,
            "trials": self.costs.trials.to_json(),
            "batches": self._dispatches.summary(),
        }


def _ignore(line: str) -> None:
    """For lines that nobody asked for."""
