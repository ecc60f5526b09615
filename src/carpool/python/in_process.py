"""Jobs in the engine's own process: check them, and run them."""

import asyncio
import contextlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from carpool.config import ServeSettings
from carpool.errors import InvalidValue, LibraryMissing, UnsupportedParameter
from carpool.jobs.interfaces import OnJobPreview
from carpool.jobs.work import work_of
from carpool.media.mesh import MeshFormat
from carpool.media.metadata import file_metadata
from carpool.media.outputs import FPS, Format, check_fps
from carpool.media.sound import SoundFormat
from carpool.python.handle import Handle, Loop, Output
from carpool.request.card import Card, Makes
from carpool.request.expand import MAX_N, grouped, merged, outputs_each, repeated
from carpool.request.images import NAMES as PICTURES
from carpool.request.images import is_pil
from carpool.request.own_values import check_n
from carpool.request.parameters import check
from carpool.types import CheckedRequest, Event, OnProgress, Request

KINDS = {"pictures": "image", "videos": "video", "meshes": "mesh", "sound": "sound"}
_FORMATS: dict[Makes, tuple[str, ...]] = {
    "meshes": get_args(MeshFormat),
    "sound": get_args(SoundFormat),
}


def checked(
    card: Card, request: Request | str, n: int, values: Mapping[str, Any]
) -> list[CheckedRequest]:
    """The parts of a job: n outputs of one request, with `values` of parameters that it lacks.

    Raises:
        Rejected: the request is invalid, or cannot be stored.
    """
    check_n(n, MAX_N)
    whole = merged(request, values)
    requests = [check(card, item, from_json=True) for item in repeated(whole, n)]
    requests = grouped(requests, outputs_each(whole, n))
    for name in requests[0].arguments.keys() & set(PICTURES):
        pictures = requests[0].arguments[name]
        if not all(map(is_pil, pictures if isinstance(pictures, list) else [pictures])):
            rule = "a job keeps PIL images, or a list of them"
            raise InvalidValue(f"{name} is a {type(pictures).__name__}: {rule}", param=name)
    return requests


def work_and_kind(
    card: Card,
    requests: Sequence[CheckedRequest],
    settings: ServeSettings,
    format: str | None,
    fps: float | None,
    inputs: Mapping[str, Any],
) -> tuple[str, dict[str, Any]]:
    """The kind of a job, and its work as stored.

    Args:
        inputs: result of `media.inputs.packed`.

    Raises:
        Rejected: the requested files cannot be made.
        LibraryMissing: the library that writes them is not installed.
    """
    makes = card.task(requests[0].task).makes
    if makes == "text":
        raise UnsupportedParameter("no job is made of a text: generate() and submit() write it")
    if makes == "videos" and importlib.util.find_spec("av") is None:
        raise LibraryMissing("videos need PyAV: pip install av")
    formats = _FORMATS.get(makes, get_args(Format))
    format = formats[0] if format is None else format
    if format not in formats:
        rule = f"must be one of {', '.join(formats)}"
        raise InvalidValue(f"output_format={format!r}: {rule}", param="output_format")
    defaults = {parameter.name: parameter.default for parameter in card.parameters}
    rate = _rate(fps, {**defaults, **requests[0].arguments})
    metadata = [file_metadata(card.id, request, settings) for request in requests]
    work = work_of(card.id, requests, inputs, format=format, fps=rate, told=metadata)
    return KINDS[makes], work


def _rate(fps: Any, values: Mapping[str, Any]) -> float:
    """Frames a second: explicit, from the request, from the model, or `FPS`."""
    rate = (values.get("frame_rate") or FPS) if fps is None else fps
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    return check_fps(rate if is_number else math.nan, "fps", repr(rate))


class InProcess:
    """Runs the parts of jobs in the engine of this process."""

    def __init__(self, loop: Loop, is_alive: Callable[[], bool]) -> None:
        self._loop, self._is_alive = loop, is_alive

    async def wait_open(self, model: str | None = None) -> None:
        if not self._is_alive():
            await asyncio.Event().wait()  # the engine failed: jobs wait for the next process

    async def submit(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnJobPreview | None = None,  # jobs here have no previews
    ) -> Output:
        here = asyncio.get_running_loop()

        def follow(event: Event) -> None:
            if event.kind == "step" and on_progress is not None:
                with contextlib.suppress(RuntimeError):  # closed: progress is no longer needed
                    here.call_soon_threadsafe(on_progress, event.step, event.steps)

        return await Handle(request, self._loop, follow)
