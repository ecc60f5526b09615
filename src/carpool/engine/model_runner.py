"""Run chosen calls on the device as one forward or one sweep, and notify observers.

This module combines the parts that describe calls, prove that they fuse, and join them
(`describe.py`, `probation`, `fuse.py`, `wrappers.py`). An exception of a forward becomes the
failure of the calls that cause it (`execute.py`). The scheduler decides which calls run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carpool.engine.containment import UNCONTAINED
from carpool.engine.describe import Describer
from carpool.engine.execute import Failure, RunCalls, Wrapper, execute
from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Inside
from carpool.engine.model.libraries import versions
from carpool.engine.numerics import Exact
from carpool.engine.observe.stats import memory
from carpool.engine.observe.timeline import Forward, ForwardObserver
from carpool.engine.observe.truncation import IN_FORWARD
from carpool.engine.parts import EngineParts
from carpool.engine.probation.probation import Probation
from carpool.engine.probation.verdicts import Verdicts
from carpool.engine.request import RequestState
from carpool.engine.scheduler import Scheduler
from carpool.engine.specs.infer import reads_caches
from carpool.engine.wrappers import wrapped
from carpool.schedule.views import NO_KIND


class ModelRunner:
    """Runs the forwards of one engine, on its thread.

    Attributes:
        describer: gives calls their fuse keys.
        probation: records which calls are proven to fuse.
        fuser: runs several calls as one forward.

    Args:
        observers: called after every forward that answers requests.
        around: the owner's wrapper; see `wrappers.py`.
        verdicts: the file that stores the verdicts of probation.
    """

    def __init__(
        self,
        parts: EngineParts,
        scheduler: Scheduler,
        observers: Sequence[ForwardObserver],
        around: Wrapper,
        verdicts: Path | None,
    ) -> None:
        loaded, settings = parts.loaded, parts.settings
        self._loaded, self._device, self._stages = loaded, loaded.device, parts.stages
        self._device_can_lag = loaded.device.is_accelerator
        self._heartbeat, self._watch = parts.heartbeat, parts.watch
        self._adapters, self._interception = parts.adapters, parts.installation.interception
        self._scheduler, self._sweeps = scheduler, parts.sweeps
        self._conditioning = parts.conditioning
        self._forward_clock = parts.clock if parts.sweeps is None else parts.sweeps.clock
        self.fuser = Fuser(is_exact=settings.numerics == "exact")
        self.probation = Probation(
            self.fuser,
            infers=settings.infer_specs,
            verdicts=Verdicts(verdicts, versions()),
            without_caches=not reads_caches(type(loaded.pipe)),
        )
        is_grouped = settings.lora_batching == "grouped"
        self.describer = Describer(self.fuser, self.probation, is_grouped_by_lora=is_grouped)
        self._observers = observers
        self._wrapped = wrapped(
            self._launch, parts, self.probation, self._run_to_compare, around, self._observed,
            self._free_memory,
        )  # fmt: skip

    def execute(self, selections: Sequence[Sequence[RequestState]]) -> list[Any]:
        """Run each selection as one forward; returns the calls' answers or `Failure`s, in order.

        If code outside the forwards fails, each call runs by itself.
        """
        target = selections[0][0].call.target
        if target.phase != "denoise":
            self._conditioning.runs(target.module, target.phase)
        is_shared = len(selections) > 1 or len(selections[0]) > 1
        run = self._wrapped[target.phase == "encode", is_shared]
        widths, free = self._scheduler.widths, self._free_memory
        try:
            if self._sweeps is None or not self._sweeps.streams(target):
                [selected] = selections
                return execute(selected, run, widths, free)
            is_trusted = self.probation.is_trusted
            return self._sweeps.execute(selections, run, widths, free, is_trusted)
        except UNCONTAINED:
            raise
        except BaseException as error:
            states = [state for selection in selections for state in selection]
            if len(states) == 1:
                return [Failure(error)]
        return [answer for state in states for answer in self.execute([[state]])]

    def inside(self, state: RequestState) -> Inside:
        """Let a private ride run its own call, inside its fiber."""
        call, context = state.call, state.context

        def run() -> Any:
            assert context is not None
            state.call, context.is_running = call, True  # `resume` has removed the call
            try:
                [answer] = self.execute([[state]])
            finally:
                context.is_running = False
                del state.call
            if isinstance(answer, Failure):
                raise answer.error
            return answer

        return Inside(run)

    def statistics(self) -> dict[str, Any]:
        """How calls fuse, memory, weight streaming, and the group of devices. From any thread."""
        sweeps, group = self._sweeps, self._loaded.group
        return {
            "fusing": self.probation.statistics(),
            "memory": memory(self._loaded),
            "streaming": None if sweeps is None else sweeps.statistics(),
            "group": None if group is None else group.statistics(),
        }

    def _observed(self, run: RunCalls) -> RunCalls:
        """Wrap a forward so that observers see it, and that it applies its calls' adapters."""
        runs_ahead = self._device.runs_ahead

        def observed(states: Sequence[RequestState]) -> list[Any]:
            self._interception.check()
            if runs_ahead:
                self._watch.start()
            rows = [state.rows for state in states]
            expected_s = self._stages.contain("predict", None, self._scheduler.expected_s, rows)
            began_s, spent_s = self._heartbeat.beat(expected_s), -self._forward_clock()
            token = IN_FORWARD.set(states)
            try:
                if any(state.call.lora for state in states):
                    with self._adapters.applied([state.call for state in states], rows):
                        answers = run(states)
                else:
                    answers = run(states)
                spent_s += self._forward_clock()
                if runs_ahead:
                    self._heartbeat.launched(expected_s)
            except RuntimeError as error:
                self._device.check(error)
                raise
            finally:
                IN_FORWARD.reset(token)
            why = self._scheduler.width_reasons.get(len(states), "split")  # split: after a failure
            forward = _record(states, began_s, spent_s, why)
            for observe in self._observers:
                self._stages.contain("observe", None, observe, forward, states=states)
            return answers

        return observed

    def _launch(self, states: Sequence[RequestState]) -> list[Any]:
        answers = self.fuser.run([state.call for state in states], [s.rows for s in states])
        if self._device_can_lag:
            self._device.launched()
        return answers

    def _free_memory(self) -> None:
        self._conditioning.clear()
        self._device.free()

    def _run_to_compare(self, calls: Sequence[Call], rows: Sequence[int], mode: Exact) -> list[Any]:
        """Run calls as one forward that answers no request: evidence of how they fuse."""
        expected_s = self._stages.contain("predict", None, self._scheduler.expected_s, rows)
        self._heartbeat.beat(expected_s)
        with self._adapters.applied(calls, rows):
            return self.fuser.fused(calls, rows, mode)


def _record(states: Sequence[RequestState], began_s: float, spent_s: float, why: str) -> Forward:
    """The record of a forward of the calls that these requests are parked on."""
    target, parked = states[0].call.target, states[0].parked
    timelines, rows = [state.timeline for state in states], [state.rows for state in states]
    adapters = {name for state in states for name, _ in state.call.lora}
    return Forward(
        target.component, target.method, target.phase, tuple(timelines), tuple(rows), began_s,
        spent_s, len(adapters), why, NO_KIND if parked is None else parked.kind,
        tuple([state.call.target.method for state in states]),
    )  # fmt: skip
