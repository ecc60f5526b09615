"""The scheduler: asks the policy which requests to start and which calls share the next forward.

It builds the policy's views of requests. `learning.py` learns the durations of forwards.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any

from carpool.engine.admission import AdmissionControl
from carpool.engine.cost_store import StoredCosts
from carpool.engine.execute import WidthLimits
from carpool.engine.fuse import decode_bytes
from carpool.engine.language.parts import BLOCK, WRITING
from carpool.engine.learning import CostLearning
from carpool.engine.observe.timeline import Forward
from carpool.engine.observe.width_reason import width_reason
from carpool.engine.parts import EngineParts
from carpool.engine.prediction import Predictor, snapshot, unpredicted_call, unpredicted_request
from carpool.engine.request import RequestState
from carpool.engine.sweep import Sweeps
from carpool.errors import SettingRejected
from carpool.schedule.cost import Costs
from carpool.schedule.policy import Policy, build, reload, widest
from carpool.schedule.sweep import choose_sweep, sweep_s
from carpool.schedule.views import NO_KIND, Admission, Choice, ParkedCall, QueuedRequest
from carpool.telemetry.activity import Snapshot
from carpool.telemetry.sglang_metrics import Dispatches
from carpool.types import CheckedRequest, RequestSize

log = logging.getLogger("carpool")

KEEP_EVERY_S = 30.0
REPORT_EVERY_S = 1.0


class Scheduler:
    """The engine's scheduler, for the engine's thread only.

    Args:
        policy: default: the one of the settings' batching mode.
    """

    def __init__(
        self, parts: EngineParts, table: StoredCosts | None, policy: Policy | None
    ) -> None:
        loaded, settings, queue, clock = parts.loaded, parts.settings, parts.queue, parts.clock
        self._sweeps, self._streamer, self._stages = parts.sweeps, loaded.streamer, parts.stages
        self._settings, self._queue, self._clock = settings, queue, clock
        self._table, self._kept_s = table, clock()
        self.costs = table.costs if table else Costs()
        self.widths = WidthLimits()
        self._predictor = Predictor(loaded.card, self.costs, loaded.vae_scale_px)
        self._dispatches = Dispatches(settings.batching_metrics_format)
        say = partial(log.info, "%s") if settings.enable_batching_metrics else lambda line: None
        self._say: Callable[[str], None] = say
        self._ending = threading.Lock()
        self._server = loaded.server
        self.costs.runs_ahead = loaded.device.runs_ahead
        self._policy = policy or build(settings, self.costs, self._server, self._dispatches, say)
        self.kind = NO_KIND  # kind of the last chosen forward
        self._sweep_s: float | None = None  # predicted seconds of the sweep; 0: unknown
        self.admission = AdmissionControl(queue, settings, self._predictor, clock)
        self.prompt_part = self._predictor.prompt_part
        self.steps_left = self._predictor.steps_left
        self.learning = CostLearning(
            self.costs, self.admission, self._predictor, parts.watch,
            runs_ahead=loaded.device.runs_ahead, streams=self._streamer is not None,
        )  # fmt: skip
        self._waiting: list[QueuedRequest] = []  # the queue at `_version`
        self._version, self._waiting_s = -1, 0.0
        self.held_s = 0.0  # predicted seconds of work queued upstream
        self.step_costs: dict[RequestSize, list[float]] = {}  # updated at `_reported_s`
        self.text_costs: dict[str, tuple[float, list[float]]] = {}  # updated as a text ends
        self._reported_s = -inf
        self.wake_s = inf  # the latest time of the next decision
        self._width_reasons: Counter[tuple[str, str]] = Counter()
        self.width_reasons: dict[int, str] = {}  # last choices', by number of requests

    def check(
        self, request: CheckedRequest, running: Sequence[RequestState], waited_s: float
    ) -> None:
        """Refuse a request that is predicted to miss its deadline or to wait too long.

        From any thread; see `AdmissionControl.refusal`.
        """
        refusal, about = self.admission.refusal, (request, running, waited_s)
        if (error := self._stages.contain("predict", None, refusal, *about)) is not None:
            raise error

    def admit(self, running: int) -> list[RequestState]:
        """Take the requests that start now out of the queue.

        Args:
            running: the number of running requests.
        """
        if self._queue.version != self._version:
            self._version, queued = self._queue.snapshot()
            self._waiting = [state.queued or self._queued_request(state) for state in queued]
            self._waiting_s = sum(queued.left_s for queued in self._waiting)
        elif running and not self._waiting:
            return []
        contain, policy = self._stages.contain, self._policy
        admission = contain("admit", None, policy.admit, self._waiting, running, self._clock())
        if admission is None:  # default: the oldest first
            free = max(0, self._settings.max_running - running)
            admission = Admission(tuple([queued.request for queued in self._waiting[:free]]))
        self.wake_s = admission.wake_s
        return self._queue.take(set(admission.requests)) if admission.requests else []

    def select(self, states: Sequence[RequestState]) -> list[list[RequestState]]:
        """Choose the parked requests that share the next forward, in their order in it.

        With streamed weights: several lists, one for each forward that shares the next sweep over
        the weights.
        """
        self.width_reasons.clear()
        contain, view, is_limited = self._stages.contain, self._view, self.widths.are_limited
        parked = [
            cached
            if (cached := state.parked) and cached.order == state.order and not is_limited
            else contain("parked", None, view, state, states=[state]) or unpredicted_call(state)
            for state in states
        ]
        chosen_calls: list[tuple[Choice, list[RequestState]]] = []
        chosen_calls = contain("choose", chosen_calls, self._choices, parked, states, states=states)
        if parked and not chosen_calls:  # default: the oldest call alone
            choice = Choice((min(parked, key=attrgetter("order")),), "failed")
            chosen_calls = [(choice, _selected(choice, states))]
        contain("count", None, self._count, chosen_calls, parked)
        if chosen_calls:
            self.kind = chosen_calls[0][0].calls[0].kind
        return [selected for _, selected in chosen_calls]

    def _choices(
        self, parked: Sequence[ParkedCall], states: Sequence[RequestState]
    ) -> list[tuple[Choice, list[RequestState]]]:
        """The policy's choices of forwards, with their requests; empty choices are dropped."""
        work_ahead_s = self._waiting_s  # queued work, here and upstream
        if self.held_s:
            work_ahead_s += self.held_s / self.costs.slowdown
        if self._sweeps is not None:
            choices = self._choose_sweep(self._sweeps, parked, states, work_ahead_s)
        else:
            choices = [self._policy.choose(parked, work_ahead_s, self._clock())]
        if len(states) == 1:
            return [(choice, list(states)) for choice in choices if choice.calls]
        selections = [(choice, _selected(choice, states)) for choice in choices]
        return [(choice, selected) for choice, selected in selections if selected]

    def _choose_sweep(
        self,
        sweeps: Sweeps,
        parked: Sequence[ParkedCall],
        states: Sequence[RequestState],
        work_ahead_s: float,
    ) -> list[Choice]:
        streamer = self._streamer
        assert streamer is not None
        for kind_name, component in {(s.kind.name, s.kind.name.rpartition(".")[0]) for s in parked}:
            self.costs.streams[kind_name] = streamer.seconds_of(component)
        state_by_order = {call.order: state for call, state in zip(parked, states, strict=True)}
        choices = choose_sweep(
            self._policy,
            parked,
            work_ahead_s,
            self._clock(),
            self.costs,
            lambda call: sweeps.may_pause(state_by_order[call.order].call),
        )
        are_known = not any(self.costs.curve(choice.calls[0].kind).is_empty for choice in choices)
        self._sweep_s = sweep_s(choices, self.costs) if are_known else 0.0
        if self._sweep_s:
            calls = [(call.kind, call.rows) for choice in choices for call in choice.calls]
            self.learning.sweep(calls, self._sweep_s)
        return choices

    def _count(self, pairs: Sequence[tuple[Choice, object]], parked: Sequence[ParkedCall]) -> None:
        """Record the remaining work of all requests, and why forwards are not wider."""
        lefts_s = [call.left_s for call in parked]
        self.admission.update(len(self._waiting), self._waiting_s, lefts_s)
        for choice, _ in pairs:
            why = choice.why
            if why == "nobody" and len(parked) > len(choice.calls):
                why = width_reason(choice, parked)
            self.width_reasons[len(choice.calls)] = why
            self._width_reasons[choice.calls[0].kind.name, why] += 1

    def _queued_request(self, state: RequestState) -> QueuedRequest:
        """The policy's view of a queued request; without predictions if predicting fails."""
        view = self._stages.contain(
            "queued", None, self._predictor.queued_request, state, states=[state]
        )
        if view is None:
            view = state.queued = unpredicted_request(state)
        return view

    def _view(self, state: RequestState) -> ParkedCall:
        """The policy's view of a call, cached until its memory limit changes."""
        view = state.parked
        if view is not None and view.key is state.key and not self.widths.are_limited:
            cap = view.max_rows  # common case: the next step
        else:
            cap = self.widths.cap(state.key, self._most_rows(state))
        if view is None or view.order != state.order or view.max_rows != cap:
            view = state.parked = self._predictor.parked_call(state, cap)
        return view

    def _most_rows(self, state: RequestState) -> int:
        """Max rows of a forward of this request's call, by the settings."""
        settings, phase = self._settings, state.call.target.phase
        max_rows = widest(settings, phase) * (BLOCK if state.call.target.method in WRITING else 1)
        if phase == "decode" and (row_bytes := decode_bytes(state.call)):
            max_rows = max(1, min(max_rows, int(settings.max_decode_gib * 2**30 // row_bytes)))
        return max_rows

    def delays_step(self, code_s: float, drawing: Sequence[ParkedCall]) -> bool:
        """Whether so much of the pipelines' own code delays those that draw by more than a step.

        Requests that arrive together would else stop all steps until each of them has begun.
        """
        steps_s = [self.costs.seconds(call.kind, call.rows) for call in drawing]
        return bool(steps_s) and code_s > max(steps_s)

    def expected_s(self, rows: Sequence[int]) -> float | None:
        """Predicted seconds of the selected forward; None if this process never ran one like it.

        With streamed weights: the seconds of the whole sweep.
        """
        if self._sweep_s is not None:
            return self._sweep_s or None
        return self.learning.expected_s(self.kind, sum(rows))

    def ended(self, state: RequestState) -> None:
        """Learn from a request that has ended well."""
        if state.timeline.tokens:
            self._predictor.ended(state)
            self.text_costs = self._predictor.text_costs(self._settings.max_running)

    def forward(self, forward: Forward) -> None:
        """An observer of forwards: records the duration of each."""
        self.kind = forward.kind  # one sweep may hold forwards of several kinds
        if forward.began_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = forward.began_s
            self.step_costs = self._predictor.step_costs(
                self._settings.max_batch_size, self._settings.max_running
            )
        self.learning.forward(self.kind, forward)

    def wait(self) -> None:
        """Sleep until the queue changes or a waiting batch is due."""
        self._stages.contain("learn", None, self.learning.learn)
        self._stages.contain("learn", None, self.keep, KEEP_EVERY_S)
        self._queue.wait(self._version, self.wake_s)

    def reload(self) -> list[str]:
        """Read the batching config again; with problems, which it returns, the old one stays."""
        try:
            reload(self._policy, self._settings, self._server)
        except SettingRejected as error:
            return [str(error)]
        return []

    def keep(self, at_most_every_s: float = 0.0) -> None:
        """Write the learned costs to their file."""
        if self._table is not None and self._clock() - self._kept_s >= at_most_every_s:
            self._table.keep()
            self._kept_s = self._clock()

    def log_last_batches(self) -> None:
        """Log the summary of the last batches of `dynamic`; from any thread."""
        with self._ending:
            for line in self._dispatches.window():
                self._say(line)

    def close(self) -> None:
        """Log the last batches, and write the learned costs."""
        for work in (self.learning.learn, self.log_last_batches, self.keep):
            self._stages.contain("learn", None, work)

    def snapshot(self, running: Sequence[RequestState]) -> Snapshot:
        """These requests and the queued ones, for monitoring. From any thread."""
        _, queued = self._queue.snapshot()
        starts_s = self.admission.starts_s(queued, len(running))
        return snapshot(self._clock(), running, queued, starts_s, self.costs.slowdown)

    def statistics(self) -> dict[str, Any]:
        """Reasons for widths, seconds of forwards, costs, overload, batches of `dynamic`."""
        return {
            "waiting_work_s": self._waiting_s * self.costs.slowdown,
            "overload": self.admission.to_json(),
            "not_wider": [
                {"component": component, "why": why, "count": count}
                for (component, why), count in sorted(self._width_reasons.copy().items())
            ],
            "seconds": self.learning.statistics(),
            "costs": self.costs.to_json(),
            "speed_factor": self.costs.slowdown,
            "batches": self._dispatches.summary(),
        }


def _selected(choice: Choice, states: Sequence[RequestState]) -> list[RequestState]:
    """The requests whose calls were chosen for a forward, in their order in it."""
    numbers = {call.request for call in choice.calls}
    selected = [state for state in states if state.number in numbers]
    # equal adapters adjacent; else a stable order
    selected.sort(key=lambda state: (state.request.lora, state.number))
    return selected
