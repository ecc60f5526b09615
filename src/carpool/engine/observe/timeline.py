"""Timelines of requests: their phases, the requests that shared their forwards, their waits.

Observers of forwards get a `Forward`. It has the timelines of its requests, not their states.

A `Timeline` belongs to one request; `TimelineStore` finds it by id, until a thousand other requests
have ended after it. The waits of a parked call are differences: `TimelineStore` sums the seconds of
all forwards, per module and per fuse key, and a call records these sums when it parks. So waiting
requests cost nothing, in any number. All methods but `to_json` are for the engine's thread.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from typing import Any
from weakref import WeakValueDictionary

from msgspec import Struct

from carpool.errors import Cancelled, CarpoolError
from carpool.schedule.views import NO_KIND, CallKind
from carpool.types import Clock, Phase, Timings

CAPACITY = 1000  # timelines kept after their requests have ended
MOST_OTHERS = 32  # co-riders listed per phase


@dataclass(slots=True, weakref_slot=True)
class Sum:
    """Seconds of forwards."""

    seconds: float = 0.0


@dataclass(slots=True)
class Mark:
    """The sums at the time when a call parked."""

    key: Hashable
    at_s: float
    of_module: Sum
    of_key: Sum
    all_s: float
    module_s: float
    key_s: float
    is_waiting: bool = True  # until its forward starts


@dataclass(slots=True)
class PhaseTimes:
    """The times of a request in one phase, in seconds."""

    start_s: float  # engine clock
    duration_s: float = 0.0
    forwards: int = 0
    forward_s: float = 0.0  # on CUDA: until the launch, like `Forward.duration_s`
    companions: int = 0  # co-riders, summed over its forwards
    others_most: int = 0
    shared_forwards: int = 0
    with_ids: dict[str, None] = field(default_factory=dict)  # ids of co-riders
    shared: list[str] = field(default_factory=list)  # ids of the last shared forward's requests
    place_s: float = 0.0  # parked while forwards of its own key ran
    incompatible_s: float = 0.0  # parked while forwards of its module with other keys ran
    modules_s: float = 0.0  # parked while forwards of other modules ran
    engine_s: float = 0.0  # parked while no forward ran: code of pipelines and engine

    def meet(self, ids: list[str], request_id: str) -> None:
        """Record the requests of a shared forward, this one included."""
        self.shared = ids
        if len(self.with_ids) < MOST_OTHERS:
            names = dict.fromkeys(ids[: MOST_OTHERS + 1])
            names.pop(request_id, None)
            self.with_ids = dict.fromkeys([*self.with_ids, *names][:MOST_OTHERS])

    def to_json(self, phase: Phase, submitted_s: float) -> dict[str, Any]:
        waited = {
            "place_in_forward": self.place_s,
            "incompatible_forwards": self.incompatible_s,
            "other_modules": self.modules_s,
            "engine": self.engine_s,
        }
        return {
            "phase": phase,
            "start_s": self.start_s - submitted_s,
            "duration_s": self.duration_s,
            "forwards": self.forwards,
            "forward_s": self.forward_s,
            "waited_s": sum(waited.values()),
            "waited_for_s": waited,
            "others_mean": self.companions / self.forwards if self.forwards else 0.0,
            "others_most": self.others_most,
            "shared_forwards": self.shared_forwards,
            "others": list(self.with_ids.copy()),
        }


@dataclass(slots=True, weakref_slot=True, eq=False)
class Timeline:
    """The history of one request since its submission. Times are of the engine's clock."""

    request_id: str
    submitted_s: float
    number: int = 0  # number of the request, in order of submission
    started_s: float = inf
    ended_s: float = inf
    step: int = 0  # denoising steps done
    steps: int = 0  # total denoising steps
    parts: int = 0  # total parts of the work after the last step: of a surface
    part: int = 0  # finished ones
    skipped_steps: int = 0
    tokens: int = 0  # generated text tokens
    submitted_at: float = 0.0  # Unix time
    error: str | None = None  # code of the error that ended it
    is_cancelled: bool = False
    replayed_calls: int = 0  # calls answered from its journal
    is_moved: bool = False  # another engine continues it
    phase: Phase = "encode"
    mark: Mark | None = None  # sums at the last parked call
    exclusive: list[str] = field(default_factory=list)  # components that it changed
    _since_s: float = inf  # start of the current stay in the phase
    _phases: dict[Phase, PhaseTimes] = field(default_factory=dict)

    def start(self, now_s: float) -> None:
        """Record that the request starts to run."""
        self.started_s = self._since_s = now_s
        self._phases["encode"] = PhaseTimes(now_s)

    def enter(self, phase: Phase, now_s: float) -> None:
        """Enter a phase, possibly again."""
        self._phases[self.phase].duration_s += now_s - self._since_s
        self.phase, self._since_s = phase, now_s
        self._phases.setdefault(phase, PhaseTimes(now_s))

    def reached(self, step: int) -> bool:
        """Record the number of denoising steps done. Returns whether it has grown."""
        if step <= self.step:
            return False
        self.step = step
        return True

    @property
    def progress(self) -> tuple[int, int]:
        """Steps and parts that are done, and all of them; the latter 0 while it is not known."""
        return self.step + self.part, self.steps and self.steps + self.parts

    def rewind(self) -> None:
        """Reset the progress: the request starts over."""
        self.step = self.part = self.skipped_steps = self.replayed_calls = self.tokens = 0
        self.mark = None

    def stop_waiting(self, all_s: float, now_s: float) -> PhaseTimes:
        """Account for the wait since the mark; `all_s` is the sum of all forwards."""
        times, mark = self._phases[self.phase], self.mark
        if mark is not None and mark.is_waiting:
            mark.is_waiting = False
            key_s, module_s = mark.of_key.seconds - mark.key_s, mark.of_module.seconds
            module_s -= mark.module_s
            times.place_s += key_s
            times.incompatible_s += module_s - key_s
            times.modules_s += all_s - mark.all_s - module_s
            times.engine_s += now_s - mark.at_s - (all_s - mark.all_s)
        return times

    def timings(self) -> Timings:
        """The durations of the queue and of each phase, after its end."""
        queue_s, total_s = min(self.started_s, self.ended_s), self.ended_s - self.submitted_s
        seconds = {f"{phase}_s": times.duration_s for phase, times in self._phases.items()}
        return Timings(queue_s=queue_s - self.submitted_s, total_s=total_s, **seconds)

    def fail(self, error: Exception | None) -> None:
        """Record the code of the error that ended the request, if any."""
        if error is not None:
            self.error = error.code if isinstance(error, CarpoolError) else CarpoolError.code
            self.is_cancelled = isinstance(error, Cancelled)

    @property
    def status(self) -> str:
        """`queued`, `running`, `ok`, `failed` or `cancelled`."""
        if self.ended_s == inf:
            return "queued" if self.started_s == inf else "running"
        if self.is_moved:
            return "queued"
        return "cancelled" if self.is_cancelled else "failed" if self.error else "ok"

    def _at(self, moment_s: float) -> float | None:
        """Unix time of a moment of the engine's clock; None for a future moment."""
        return None if moment_s == inf else self.submitted_at + moment_s - self.submitted_s

    def to_json(self, now_s: float) -> dict[str, Any]:
        """The whole timeline, without the parked call. Moments are seconds since submission."""
        until_s = min(self.ended_s, now_s)
        phases = []
        for phase, times in self._phases.copy().items():
            phases.append(times.to_json(phase, self.submitted_s))
            if self.ended_s == inf and phase == self.phase:
                phases[-1]["duration_s"] += until_s - self._since_s
        return {
            "id": self.request_id,
            "status": self.status,
            "error": self.error,
            "step": self.step,
            "steps": self.steps,
            "surface": self.part / self.parts if self.parts else None,
            "skipped_steps": self.skipped_steps,
            "tokens": self.tokens,
            "exclusive": self.exclusive,
            "replayed_calls": self.replayed_calls,
            "submitted_at": self.submitted_at,
            "started_at": self._at(self.started_s),
            "ended_at": self._at(self.ended_s),
            "queued_s": min(self.started_s, until_s) - self.submitted_s,
            "total_s": until_s - self.submitted_s,
            "phases": phases,
        }


class Forward(Struct, frozen=True):
    """One run of a module for one or several requests: the record for observers.

    Runs that raised are not recorded.
    """

    component: str  # the pipeline's name for the module, such as "transformer"
    method: str
    phase: Phase
    timelines: tuple[Timeline, ...]  # timelines of its requests
    row_counts: tuple[int, ...]  # batch rows of each request
    began_s: float  # engine clock
    duration_s: float  # on CUDA: until the launch of the kernels, not their end
    adapters: int = 0  # number of different adapters
    why: str = ""  # why it is not wider: see `width_reason`
    kind: CallKind = NO_KIND
    methods: tuple[str, ...] = ()  # methods of each request

    @property
    def requests(self) -> int:
        return len(self.timelines)

    @property
    def rows(self) -> int:
        return sum(self.row_counts)


def width_of(row_counts: Sequence[int]) -> int:
    """The sum, rounded up to five binary digits: texts have too many widths to count each."""
    rows = sum(row_counts)
    digit = 1 << max(0, rows.bit_length() - 5)
    return -(-rows // digit) * digit


ForwardObserver = Callable[[Forward], None]
"""Called after each forward, on the engine's thread, before its requests resume; must not block."""


class TimelineStore:
    """All queued and running requests, and the last ended ones; sums of their forwards."""

    def __init__(self, capacity: int = CAPACITY, wall_clock: Clock = time.time) -> None:
        self._wall_clock = wall_clock
        self._timelines: WeakValueDictionary[str, Timeline] = WeakValueDictionary()
        self._ended: deque[Timeline] = deque(maxlen=capacity)
        self._all_s = 0.0
        self._modules: dict[Hashable, Sum] = {}
        self._keys: WeakValueDictionary[Hashable, Sum] = WeakValueDictionary()  # parked calls'

    def begin(self, request_id: str, now_s: float, number: int = 0) -> Timeline:
        """Create a timeline; `to_json` finds it at least while the caller holds it."""
        timeline = self._timelines[request_id] = Timeline(
            request_id, now_s, number, submitted_at=self._wall_clock()
        )
        return timeline

    def to_json(self, request_id: str, now_s: float) -> dict[str, Any] | None:
        """The newest timeline with this id; None once it was dropped. From any thread."""
        timeline = self._timelines.get(request_id)
        return None if timeline is None else timeline.to_json(now_s)

    def parked(self, timeline: Timeline, module: Hashable, key: Hashable, now_s: float) -> None:
        """Record that the request waits with a call of this key."""
        before = timeline.mark
        if before is not None and before.is_waiting:
            timeline.stop_waiting(self._all_s, now_s)  # its last forward failed
        if before is not None and before.key is key:
            of_module, of_key = before.of_module, before.of_key
        else:
            of_module = self._modules.setdefault(module, Sum())
            sum_of_key = self._keys.get(key)
            of_key = self._keys.setdefault(key, Sum()) if sum_of_key is None else sum_of_key
        timeline.mark = Mark(
            key, now_s, of_module, of_key, self._all_s, of_module.seconds, of_key.seconds
        )

    def forward(self, forward: Forward) -> None:
        """Record a forward: count it for its requests and add it to the sums."""
        timelines = forward.timelines
        seconds, companions = forward.duration_s, len(timelines) - 1
        ids = [timeline.request_id for timeline in timelines]
        for timeline, method in zip_longest(timelines, forward.methods):
            times = timeline.stop_waiting(self._all_s, forward.began_s)
            times.forwards += 1
            timeline.tokens += method == "generate"
            times.forward_s += seconds
            times.companions += companions
            times.shared_forwards += companions > 0
            times.others_most = max(times.others_most, companions)
            if companions and times.shared != ids:
                times.meet(ids, timeline.request_id)
        self._all_s += seconds
        if (mark := timelines[0].mark) is not None:
            mark.of_module.seconds += seconds
            mark.of_key.seconds += seconds

    def end(self, timeline: Timeline, error: Exception | None, now_s: float) -> None:
        """Record the end of a request, whether it ran or not."""
        if timeline.started_s < inf:
            timeline.stop_waiting(self._all_s, now_s)
            timeline.enter(timeline.phase, now_s)
        timeline.mark = None
        timeline.ended_s = now_s
        timeline.fail(error)
        self._ended.append(timeline)
