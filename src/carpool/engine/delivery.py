"""Deliver outcomes: convert outputs on the host and notify the listeners, off the main loop."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any

from carpool.engine.containment import EngineLost, Stages
from carpool.engine.model.device import Device
from carpool.engine.model.settings_used import SettingsUsed
from carpool.engine.model.view import finish
from carpool.engine.request import Outcome, RequestState
from carpool.engine.weights.mapped_files import MappedFiles
from carpool.errors import CarpoolError, PipelineFailed, WorkerLost, named
from carpool.types import CheckedRequest, Event, Timings

RunOffLoop = Callable[[Callable[[], None]], object]
"""Runs work on another thread, in the order given: `executor.submit`, or a test's own."""


class OffLoop:
    """Threads outside the main loop: for outcomes and previews, for host calls, and for waits.

    Args:
        run: replaces all of these threads, for tests.
    """

    def __init__(self, run: RunOffLoop | None) -> None:
        self._finishing = ThreadPoolExecutor(1, "carpool-finish")
        self._hosting = ThreadPoolExecutor(1, "carpool-text")
        self.finish: RunOffLoop = run or self._finishing.submit
        self.host: RunOffLoop = run or self._hosting.submit
        thread = partial(Thread, name="carpool-language", daemon=True)  # the end waits for none
        self.wait: RunOffLoop = run or (lambda work: thread(target=work).start())

    def close(self) -> None:
        """Wait for outcomes in progress; drop queued host calls: their requests have ended."""
        self._hosting.shutdown(cancel_futures=True)
        self._finishing.shutdown()


def deliver(
    state: RequestState,
    output: Any,
    error: Exception | None,
    now_s: float,
    device: Device,
    files: MappedFiles | None,
    settings: SettingsUsed,
    off_loop: RunOffLoop,
    stages: Stages,
) -> None:
    """Give a finished request's outcome to its listener, whatever fails; once.

    Args:
        output: the pipeline's output, on the device; not read if there is an error.
        now_s: engine clock.
        off_loop: runs the conversion and the delivery.
    """
    if not state.take_answer():
        return
    request, listener, timeline = state.request, state.listener, state.timeline
    timings = stages.contain("timeline", Timings(), timeline.timings, states=[state])
    mark = stages.contain("tell", None, device.mark)
    text = getattr(output, "revised_prompt", None)

    def convert_and_tell() -> None:
        fields: dict[str, Any] = {}
        settings_used: dict[str, Any] = {}
        failure = error
        try:
            if failure is None:
                stages.reach("convert", [state])
                if files is not None:  # an output of other weights may be any picture
                    files.check_all()
                fields = finish(output, partial(device.to_host, mark=mark))
                settings_used = stages.contain("count", settings_used, settings.of, request, fields)
                settings_used |= {} if text is None else {"revised_prompt": text}
        except BaseException as defect:
            failure = _conversion_failed(defect, device)
            timeline.fail(failure)
        step, steps, skipped = timeline.step, timeline.steps, timeline.skipped_steps
        sizes = request, settings_used, state.warnings
        other_size = stages.contain("count", None, _other_size, *sizes)
        warnings = (*state.warnings, *(other_size or ()))
        outcome = Outcome(request, fields, failure, timings, warnings, skipped, settings_used)
        stages.contain("tell", None, listener.done, outcome, states=[state])
        finished = Event("finished", request.request_id, now_s, step, steps, failure)
        stages.contain("tell", None, listener.event, finished, states=[state])

    try:
        off_loop(convert_and_tell)
    except RuntimeError:  # the thread pool is shut down
        convert_and_tell()


def _other_size(
    request: CheckedRequest, settings_used: Mapping[str, Any], warnings: Sequence[str]
) -> list[str]:
    """The warning for an output of a size that differs from the request, if not yet warned."""
    sides = [request.arguments.get(name) for name in ("width", "height")]
    output_sides = [settings_used.get(name) for name in ("width", "height")]
    if None in sides or None in output_sides or sides == output_sides:
        return []
    is_pasted = request.arguments.get("padding_mask_crop") is not None  # the input image's size
    if is_pasted or any("size" in warning or "width" in warning for warning in warnings):
        return []
    return ["size {}x{} was drawn as {}x{}".format(*sides, *output_sides)]


def _conversion_failed(defect: BaseException, device: Device) -> CarpoolError:
    try:
        if isinstance(defect, Exception):
            device.check(defect)
    except EngineLost as error:
        return WorkerLost(f"{error}: the output is lost with it")
    failure = PipelineFailed(f"the output cannot be converted: {named(defect)}")
    failure.__cause__ = defect
    return failure
