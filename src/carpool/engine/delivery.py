"""Deliver outcomes: convert outputs on the host and tell the listeners, off the main loop."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from carpool.engine.model.device import Device, DeviceLost
from carpool.engine.model.settings_used import SettingsUsed
from carpool.engine.model.view import finish
from carpool.engine.request import Outcome, RequestState
from carpool.errors import PipelineFailed, WorkerLost, reason
from carpool.types import CheckedRequest, Event

RunOffLoop = Callable[[Callable[[], None]], object]
"""Runs work on another thread, in the order given: `executor.submit`, or a test's own."""


class OffLoop:
    """Two threads beside the main loop: one for outcomes and previews, one for host calls.

    Args:
        run: runs all of it instead, for tests.
    """

    def __init__(self, run: RunOffLoop | None) -> None:
        self._finishing = ThreadPoolExecutor(1, "carpool-finish")
        self._hosting = ThreadPoolExecutor(1, "carpool-text")
        self.finish: RunOffLoop = run or self._finishing.submit
        self.host: RunOffLoop = run or self._hosting.submit

    def close(self) -> None:
        """Wait for the outcomes that are under way; drop host calls, which nobody waits for."""
        self._hosting.shutdown(cancel_futures=True)
        self._finishing.shutdown()


def deliver(
    state: RequestState,
    output: Any,
    error: Exception | None,
    now_s: float,
    device: Device,
    settings: SettingsUsed,
    off_loop: RunOffLoop,
) -> None:
    """Give a finished request's outcome to its listener.

    Args:
        output: of the pipeline, on the device; not read if there is an error.
        now_s: engine clock.
        off_loop: where it happens.
    """
    request, listener, timeline = state.request, state.listener, state.timeline
    timings, mark = timeline.timings(), device.mark()

    def convert_and_tell() -> None:
        fields: dict[str, Any] = {}
        used: dict[str, Any] = {}
        failure = error
        try:
            if failure is None:
                fields = finish(output, partial(device.to_host, mark=mark))
                used = settings.of(request, fields)
        except Exception as defect:
            try:
                device.check(defect)
            except DeviceLost as lost:
                failure = WorkerLost(f"{lost}: the output is lost with it")
            else:
                failure = PipelineFailed(f"the output cannot be converted: {named(defect)}")
                failure.__cause__ = defect
                timeline.fail(failure)
        skipped = timeline.skipped_steps
        warnings = (*state.warnings, *_other_size(request, used, state.warnings))
        listener.done(Outcome(request, fields, failure, timings, warnings, skipped, used))
        step, steps = timeline.step, timeline.steps
        listener.event(Event("finished", request.request_id, now_s, step, steps, failure))

    off_loop(convert_and_tell)


def _other_size(
    request: CheckedRequest, used: Mapping[str, Any], warnings: Sequence[str]
) -> list[str]:
    """The warning for an output of another size than was asked for, unless there is one."""
    sides = [request.arguments.get(name) for name in ("width", "height")]
    drawn = [used.get(name) for name in ("width", "height")]
    if None in sides or None in drawn or sides == drawn:
        return []
    is_pasted = request.arguments.get("padding_mask_crop") is not None  # into its picture
    if is_pasted or any("size" in said or "width" in said for said in warnings):
        return []
    return ["size {}x{} was drawn as {}x{}".format(*sides, *drawn)]


def named(error: Exception) -> str:
    """An error's class and message."""
    return f"{type(error).__name__}: {reason(error)}"
