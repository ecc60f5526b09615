"""Run chosen calls on the device: one forward or one sweep, adapters applied, observers told.

How calls are described, proven to fuse, and joined is put together here (`describe.py`,
`probation`, `fuse.py`). What does not fit the device's memory is split, or runs in tiles; what a
forward raises becomes the failure of the calls that cause it (`execute.py`). Which calls run is not
decided here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from carpool.config import EngineSettings
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.containment import UNCONTAINED, Stages
from carpool.engine.describe import Describer
from carpool.engine.draws import Draws
from carpool.engine.execute import Failure, RunCalls, execute
from carpool.engine.faults import Faults
from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Inside, Interception
from carpool.engine.model.load import LoadedPipeline, versions
from carpool.engine.model.tiling import can_tile, tiles
from carpool.engine.numerics import Exact
from carpool.engine.observe.forward import ForwardObserver, forward_of
from carpool.engine.observe.loop_progress import LoopProgress
from carpool.engine.observe.stats import memory
from carpool.engine.probation.probation import Probation
from carpool.engine.probation.verdicts import Verdicts
from carpool.engine.request import RequestState
from carpool.engine.scheduler import Scheduler
from carpool.engine.specs.infer import reads_caches
from carpool.engine.sweep import Sweeps
from carpool.types import Clock


class ModelRunner:
    """Runs the forwards of one engine, on its thread.

    Attributes:
        describer: gives calls the keys by which they fuse.
        probation: what is known of how calls fuse.
        fuser: makes one forward of several calls.

    Args:
        sweeps: of a model whose weights are streamed.
        observers: called after every forward that answers requests.
        around: wraps the function that runs those forwards.
        verdicts: file in which is kept how calls fuse.
    """

    def __init__(
        self,
        loaded: LoadedPipeline,
        settings: EngineSettings,
        adapters: Adapters,
        interception: Interception,
        scheduler: Scheduler,
        heartbeat: LoopProgress,
        sweeps: Sweeps | None,
        clock: Clock,
        observers: Sequence[ForwardObserver],
        around: Callable[[RunCalls], RunCalls],
        stages: Stages,
        faults: Faults | None,
        *,
        verdicts: Path | None,
    ) -> None:
        self._loaded, self._device = loaded, loaded.device
        self._clock, self._heartbeat = clock, heartbeat
        self._adapters, self._interception = adapters, interception
        self._scheduler, self._sweeps, self._stages = scheduler, sweeps, stages
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
        run = Draws(loaded.device.torch).around(self._run)
        if faults is not None:
            run = faults.around(run, is_exact=self.fuser.is_exact)
        self._run_forward = self.probation.around(around(run), self._run_to_compare)

    def execute(self, selections: Sequence[Sequence[RequestState]]) -> list[Any]:
        """Run each selection as one forward; their calls' answers, or `Failure`s, in order.

        Where something beside the forwards fails, each call is run by itself.
        """
        states = [state for selection in selections for state in selection]
        try:
            return self._execute(selections)
        except UNCONTAINED:
            raise
        except BaseException as error:
            if len(states) == 1:
                return [Failure(error)]
        return [answer for state in states for answer in self.execute([[state]])]

    def _execute(self, selections: Sequence[Sequence[RequestState]]) -> list[Any]:
        run, widths, free = self._run_forward, self._scheduler.widths, self._free_memory
        if self._sweeps is None or not self._sweeps.streams(selections[0][0].call.target):
            [selected] = selections
            return execute(selected, run, widths, free, in_tiles=self._run_in_tiles)
        return self._sweeps.execute(
            selections, run, widths, free, self.probation.is_trusted, in_tiles=self._run_in_tiles
        )

    def inside(self, state: RequestState) -> Inside:
        """Have a private ride run its call itself, inside of its fiber."""
        call, context = state.call, state.context

        def run() -> Any:
            assert context is not None
            state.call, context.is_running = call, True  # `resume` has dropped the call
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
        """How calls fuse, memory, and what a streamed model or a group does. From any thread."""
        sweeps, group = self._sweeps, self._loaded.group
        return {
            "fusing": self.probation.statistics(),
            "memory": memory(self._loaded),
            "streaming": None if sweeps is None else sweeps.statistics(),
            "group": None if group is None else group.statistics(),
        }

    def _run(self, states: Sequence[RequestState]) -> list[Any]:
        """Run these calls as one forward, and tell the observers of it."""
        calls, rows = [state.call for state in states], [state.rows for state in states]
        self._interception.check()
        self._scheduler.learning.watch.start()
        expected_s = self._expected_s(rows)
        self._heartbeat.beat(expected_s)
        began_s = self._clock()
        try:
            with self._adapters.applied(calls, rows):
                if self._sweeps is None:
                    answers, spent_s = self._launch(calls, rows), self._clock() - began_s
                else:
                    answers, spent_s = self._sweeps.timed(self._launch, calls, rows)
            if self._device.runs_ahead:
                self._heartbeat.launched(expected_s)
        except RuntimeError as error:
            self._device.check(error)
            raise
        why = self._scheduler.why_not_wider(len(states))
        forward = forward_of(states, began_s, began_s + spent_s, why)
        for observe in self._observers:
            self._stages.contain("observe", None, observe, forward, states=states)
        return answers

    def _expected_s(self, rows: Sequence[int]) -> float | None:
        return self._stages.contain("predict", None, self._scheduler.expected_s, rows)

    def _launch(self, calls: Sequence[Call], rows: Sequence[int]) -> list[Any]:
        answers = self.fuser.run(calls, rows)
        self._device.launched()
        return answers

    def _free_memory(self) -> None:
        self.fuser.forget()
        self._device.free()

    def _run_in_tiles(self, state: RequestState) -> list[Any] | None:
        """Run a call that does not fit; None if its module knows no tiles."""
        target = state.call.target
        if not can_tile(target.module):
            return None
        with tiles(target.module):
            answers = self._run_forward([state])
        state.warnings.append(
            f"{target.component}.{target.method} did not fit the device's memory and ran in tiles: "
            "seams may show; a smaller size needs none"
        )
        return answers

    def _run_to_compare(self, calls: Sequence[Call], rows: Sequence[int], mode: Exact) -> list[Any]:
        """Run calls as one forward that answers no request: evidence of how they fuse."""
        self._heartbeat.beat(self._expected_s(rows))
        with self._adapters.applied(calls, rows):
            return self.fuser.fused(calls, rows, mode)
