"""The scheduler without a model: the production policies under a virtual clock.

A simulated request goes through its calls as a real one does: encoders, denoiser, decoder.
A forward takes what the cost table says, and a constant for each call. There is no noise, unless a
`Machine` makes some; then the policy may learn its costs from the forwards, as an engine does.
"""

from bisect import bisect_left
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from carpool.schedule.cost import Costs
from carpool.schedule.policy import Policy
from carpool.schedule.sweep import choose_sweep
from carpool.schedule.views import CallKind, Choice, ParkedCall, QueuedRequest
from carpool.types import Phase
from carpool_lab.simulate.machine import Machine


@dataclass(frozen=True, slots=True)
class Stage:
    """Equal calls of one request, one after the other."""

    kind: CallKind
    phase: Phase
    key: Hashable
    call_s: float  # one call, alone on the device
    rows: int = 1
    count: int = 1


@dataclass(slots=True)
class SimulatedRequest:
    """A simulated request, from its arrival to its end."""

    waiting: QueuedRequest
    stages: tuple[Stage, ...]
    label: str = ""  # its class, for the report
    number: int = 0  # in the fleet, from 1
    ended_s: float = inf
    at: int = 0  # stage
    calls_done: int = 0  # calls of the stage
    left_s: float = 0.0
    forwards: int = field(init=False)  # of denoising, all of them

    def __post_init__(self) -> None:
        self.forwards = sum(stage.count for stage in self.stages if stage.phase == "denoise")

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.waiting.arrived_s

    @property
    def made_s(self) -> float:
        """Seconds of its finished calls, alone on the device; 0 before its first start."""
        if not (self.at or self.calls_done):
            return 0.0
        made_s = sum(stage.call_s * stage.count for stage in self.stages[: self.at])
        return made_s + self.calls_done * self.stages[self.at].call_s

    @property
    def solo_s(self) -> float:
        return self.waiting.whole_s

    def arrive(self, now_s: float) -> None:
        """Move the arrival, and the deadline with it."""
        late_s = now_s - self.waiting.arrived_s
        deadline_s = self.waiting.deadline_s + late_s
        self.waiting = replace(self.waiting, arrived_s=now_s, deadline_s=deadline_s)


@dataclass(slots=True)
class Result:
    """The result of a simulation."""

    requests: list[SimulatedRequest]  # in the order of their arrivals
    ended_s: float = 0.0
    forwards: int = 0  # of denoising
    rows: int = 0  # of those forwards
    batches: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # if asked for


class LearnedStages:
    """Seconds of stages by learned costs: of one call of each, and of all stages after it."""

    def __init__(self, stages: tuple[Stage, ...], beliefs: Costs) -> None:
        self.stages = stages
        self.call_s = [beliefs.baseline_s(stage.kind, stage.rows) for stage in stages]
        whole_s = [stage.count * call_s for stage, call_s in zip(stages, self.call_s, strict=True)]
        self.after_s = [sum(whole_s[place:]) for place in range(1, len(stages) + 1)]


@dataclass(slots=True)
class Worker:
    """One device with its policy and its queue."""

    policy: Policy
    costs: Costs
    max_rows: Mapping[Phase, int]
    own_s: float = 0.0  # of the loop and the pipeline's own code, for each call of a forward
    machine: Machine | None = None  # what disturbs forwards
    beliefs: Costs | None = None  # learned from forwards; None: the policy knows `costs`
    is_traced: bool = False
    is_whole: bool = False  # batches run to their ends, and nobody looks on: see `_run_on`
    line: list[SimulatedRequest] = field(default_factory=list)
    waiting: list[QueuedRequest] = field(default_factory=list)  # of the line
    waiting_s: float = 0.0  # its work
    held_s: float = 0.0  # this worker's part of the work that waits for the fleet
    running: dict[int, SimulatedRequest] = field(default_factory=dict)
    parked: dict[int, ParkedCall] = field(default_factory=dict)
    orders: int = 0
    last: int = 0  # request
    _believed: dict[int, "LearnedStages"] = field(default_factory=dict)  # by the stages' identity
    result: Result = field(default_factory=lambda: Result([]))

    def take(self, simulated: SimulatedRequest) -> None:
        """Remove a request between two forwards; it keeps the steps that it has made."""
        request = simulated.waiting.request
        if request in self.running:
            del self.running[request], self.parked[request]
            return
        place = self.line.index(simulated)
        del self.line[place]
        self.waiting_s -= self.waiting.pop(place).whole_s

    @property
    def work_s(self) -> float:
        """Predicted work, waiting and running."""
        return self.waiting_s + sum(simulated.left_s for simulated in self.running.values())

    def put(self, simulated: SimulatedRequest) -> None:
        waiting = simulated.waiting
        if waiting.request <= self.last:  # requests of one worker are numbered upwards
            waiting = simulated.waiting = replace(waiting, request=self.last + 1)
        self.last = max(self.last, waiting.request)
        if self.beliefs is not None:
            work_s = self._believed_s(simulated)
            waiting = replace(waiting, left_s=work_s, whole_s=work_s)
        self.line.append(simulated)
        self.waiting.append(waiting)
        self.waiting_s += waiting.whole_s

    def turn(self, now_s: float) -> tuple[bool, float]:
        """Make one turn; returns whether a forward ran, and the time of the next turn."""
        admission = self.policy.admit(self.waiting, len(self.running), now_s)  # as the engine asks
        wake_s = admission.wake_s
        for request in sorted(admission.requests):
            self._board(request)
        costs = self.costs if self.beliefs is None else self.beliefs
        parked = list(self.parked.values())
        choices = choose_sweep(self.policy, parked, self.waiting_s + self.held_s, now_s, costs)
        if not choices:
            return False, wake_s
        compute_s = sum([self._run(choice, now_s) for choice in choices])
        calls = [call for choice in choices for call in choice.calls]
        seconds = max(compute_s, self.costs.stream_s(calls[0].kind))
        ends_s = now_s + seconds + self.own_s * len(calls)
        if self.is_whole and len(choices) == 1 and len(calls) == len(parked):
            ends_s = self._run_on(choices[0], ends_s)
        for call in sorted(calls, key=lambda call: call.request):
            self._advance(self.running[call.request], ends_s)
        return True, ends_s

    def _run(self, choice: Choice, now_s: float) -> float:
        """Run one forward; returns the seconds of computing it."""
        leader, rows = choice.calls[0], sum([call.rows for call in choice.calls])
        seconds = self.costs.compute_s(leader.kind, rows)
        if self.machine is not None:
            simulated = self.running[leader.request]
            step = leader.request, simulated.at, simulated.calls_done
            seconds *= self.machine.factor(now_s, len(choice.calls), step, seconds)
        if self.beliefs is not None:
            self.beliefs.learn(leader.kind, rows, seconds)
            self._believed.clear()
        if leader.phase == "denoise":
            self.result.forwards += 1
            self.result.rows += rows
        if self.is_traced:
            names = tuple(sorted(call.request for call in choice.calls))
            self.result.batches.append((leader.phase, names))
        return seconds

    def _run_on(self, choice: Choice, now_s: float) -> float:
        """Run the forwards of a batch that follow a first one, all but the last of them at once.

        Every running request is in it, and a mode that batches at admission lets nobody join, so
        each of them is of the same calls until one of these is done with its stage. The orders in
        which they would be parked between two are not needed.

        Returns:
            When the last of them ends. `_advance` then counts for one forward, as ever.
        """
        calls, leader = choice.calls, choice.calls[0]
        requests = [self.running[call.request] for call in calls]
        calls_gained = (
            min(
                simulated.stages[simulated.at].count - simulated.calls_done
                for simulated in requests
            )
            - 1
        )
        rows = sum(call.rows for call in calls)
        compute_s = self.costs.compute_s(leader.kind, rows)
        stream_s, own_s = self.costs.stream_s(leader.kind), self.own_s * len(calls)
        first = min(calls, key=lambda call: call.request)  # leads as soon as all were parked again
        simulated, step_s = self.running[first.request], compute_s
        for number in range(simulated.calls_done + 1, simulated.calls_done + 1 + calls_gained):
            if self.machine is not None:
                step = first.request, simulated.at, number
                step_s = compute_s * self.machine.factor(now_s, len(calls), step, compute_s)
            now_s = now_s + max(step_s, stream_s) + own_s
        for simulated in requests:
            simulated.calls_done += calls_gained
            simulated.left_s -= calls_gained * simulated.stages[simulated.at].call_s
        if leader.phase == "denoise":
            self.result.forwards += calls_gained
            self.result.rows += calls_gained * rows
        return now_s

    def _board(self, request: int) -> None:
        place = 0
        if self.waiting[0].request != request:  # the line is in the order of numbers
            place = bisect_left(self.waiting, request, key=lambda waiting: waiting.request)
        simulated = self.line.pop(place)
        self.waiting_s -= self.waiting.pop(place).whole_s
        simulated.left_s = simulated.solo_s - simulated.made_s
        self.running[request] = simulated
        self._park(simulated)

    def _advance(self, simulated: SimulatedRequest, now_s: float) -> None:
        stage = simulated.stages[simulated.at]
        simulated.left_s -= stage.call_s
        simulated.calls_done += 1
        if simulated.calls_done == stage.count:
            simulated.at, simulated.calls_done = simulated.at + 1, 0
        if simulated.at < len(simulated.stages):
            self._park(simulated)
        else:
            simulated.ended_s = now_s
            self.result.requests.append(simulated)
            del self.running[simulated.waiting.request], self.parked[simulated.waiting.request]

    def _park(self, simulated: SimulatedRequest) -> None:
        stage, waiting = simulated.stages[simulated.at], simulated.waiting
        left_s, whole_s = simulated.left_s, waiting.whole_s
        if self.beliefs is not None:
            left_s = self._believed_s(simulated)
            whole_s *= left_s / simulated.left_s
        self.orders += 1
        self.parked[waiting.request] = ParkedCall(
            self.orders,
            waiting.request,
            stage.key,
            stage.rows,
            self.max_rows[stage.phase],
            stage.phase,
            stage.kind,
            waiting.arrived_s,
            left_s,
            whole_s,
            waiting.deadline_s,
            waiting.priority,
            waiting.tenant,
            waiting.user,
            simulated.forwards,
        )

    def _believed_s(self, simulated: SimulatedRequest) -> float:
        """Seconds of work that a request has left, by learned costs."""
        learned = self._believed.get(id(simulated.stages))
        if learned is None:
            assert self.beliefs is not None
            learned = self._believed[id(simulated.stages)] = LearnedStages(
                simulated.stages, self.beliefs
            )
        remaining = simulated.stages[simulated.at].count - simulated.calls_done
        return remaining * learned.call_s[simulated.at] + learned.after_s[simulated.at]
