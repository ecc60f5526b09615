"""The scheduler without a model: the production policies under a virtual clock.

A simulated request makes the calls of a real one: encoders, denoiser, decoder. The duration of a
forward is its entry in the cost table plus a constant for each call. Durations are exact, unless a
`Machine` disturbs them; then the policy may learn costs from the forwards, as an engine does.
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
    """Consecutive equal calls of one request."""

    kind: CallKind
    phase: Phase
    key: Hashable
    call_s: float  # duration of a call alone on the device
    rows: int = 1
    count: int = 1


@dataclass(slots=True)
class SimulatedRequest:
    """A simulated request and its progress."""

    waiting: QueuedRequest
    stages: tuple[Stage, ...]
    label: str = ""  # its class in the report
    number: int = 0  # in the fleet, from 1
    ended_s: float = inf
    at: int = 0  # stage
    calls_done: int = 0  # calls of the stage
    left_s: float = 0.0
    forwards: int = field(init=False)  # all denoising forwards

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
        """Set the arrival; the deadline moves with it."""
        late_s = now_s - self.waiting.arrived_s
        deadline_s = self.waiting.deadline_s + late_s
        self.waiting = replace(self.waiting, arrived_s=now_s, deadline_s=deadline_s)


@dataclass(slots=True)
class Result:
    """The result of a simulation."""

    requests: list[SimulatedRequest]  # in order of arrival
    ended_s: float = 0.0
    forwards: int = 0  # of denoising
    rows: int = 0  # rows of denoising forwards
    batches: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # optional


@dataclass(slots=True)
class Worker:
    """One device with its policy and its queue."""

    policy: Policy
    costs: Costs
    max_rows: Mapping[Phase, int]
    own_s: float = 0.0  # loop and pipeline code, per call of a forward
    machine: Machine | None = None  # disturbs forwards
    beliefs: Costs | None = None  # learned from forwards; None: the policy knows `costs`
    is_traced: bool = False
    line: list[SimulatedRequest] = field(default_factory=list)
    waiting: list[QueuedRequest] = field(default_factory=list)  # views of the waiting requests
    waiting_s: float = 0.0  # total work of waiting requests
    held_s: float = 0.0  # this worker's part of the fleet's waiting work
    running: dict[int, SimulatedRequest] = field(default_factory=dict)
    parked: dict[int, ParkedCall] = field(default_factory=dict)
    orders: int = 0
    last: int = 0  # newest request
    result: Result = field(default_factory=lambda: Result([]))

    def take(self, simulated: SimulatedRequest) -> None:
        """Remove a request between two forwards; it keeps its finished steps."""
        request = simulated.waiting.request
        if request in self.running:
            del self.running[request], self.parked[request]
            return
        place = self.line.index(simulated)
        del self.line[place]
        self.waiting_s -= self.waiting.pop(place).whole_s

    def put(self, simulated: SimulatedRequest) -> None:
        waiting = simulated.waiting
        if waiting.request <= self.last:  # a worker's requests have ascending numbers
            waiting = simulated.waiting = replace(waiting, request=self.last + 1)
        self.last = max(self.last, waiting.request)
        if self.beliefs is not None:
            work_s = self._believed_s(simulated)
            waiting = replace(waiting, left_s=work_s, whole_s=work_s)
        self.line.append(simulated)
        self.waiting.append(waiting)
        self.waiting_s += waiting.whole_s

    def turn(self, now_s: float) -> tuple[bool, float]:
        """Run one turn; returns whether a forward ran, and the time of the next turn."""
        admission = self.policy.admit(self.waiting, len(self.running), now_s)  # the engine's call
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
        for call in sorted(calls, key=lambda call: call.request):
            self._advance(self.running[call.request], ends_s)
        return True, ends_s

    def _run(self, choice: Choice, now_s: float) -> float:
        """Run one forward; returns its compute seconds."""
        leader, rows = choice.calls[0], sum([call.rows for call in choice.calls])
        seconds = self.costs.compute_s(leader.kind, rows)
        if self.machine is not None:
            simulated = self.running[leader.request]
            step = leader.request, simulated.at, simulated.calls_done
            seconds *= self.machine.factor(now_s, len(choice.calls), step, seconds)
        if self.beliefs is not None:
            self.beliefs.learn(leader.kind, rows, seconds)
        if leader.phase == "denoise":
            self.result.forwards += 1
            self.result.rows += rows
        if self.is_traced:
            names = tuple(sorted(call.request for call in choice.calls))
            self.result.batches.append((leader.phase, names))
        return seconds

    def _board(self, request: int) -> None:
        place = 0
        if self.waiting[0].request != request:  # the line is sorted by number
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
        """Remaining seconds of a request, by learned costs."""
        assert self.beliefs is not None
        left_s = 0.0
        for place, stage in enumerate(simulated.stages[simulated.at :]):
            calls = stage.count if place else stage.count - simulated.calls_done
            left_s += calls * self.beliefs.baseline_s(stage.kind, stage.rows)
        return left_s
