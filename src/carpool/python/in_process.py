"""Jobs in the engine's own process: check them, run them, write their files."""

import asyncio
import contextlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from carpool.config import ServeSettings
from carpool.engine.loop import EngineCore
from carpool.errors import InvalidValue, LibraryMissing, PipelineFailed, UnsupportedParameter
from carpool.jobs.database import Record
from carpool.jobs.interfaces import OnJobPreview
from carpool.jobs.work import work_of
from carpool.media import outputs
from carpool.media.mesh import MeshFormat, encode_mesh, files_beside
from carpool.media.metadata import file_metadata, with_used
from carpool.media.outputs import FPS, Format, check_fps, write_mp4
from carpool.media.sound import SoundFormat, encode_sound
from carpool.python.handle import Handle, Output
from carpool.request.card import Card, Makes
from carpool.request.expand import MAX_N, grouped, merged, outputs_each, repeated
from carpool.request.images import NAMES as PICTURES
from carpool.request.images import is_pil
from carpool.request.own_values import check_n
from carpool.request.parameters import check
from carpool.types import CheckedRequest, Event, OnProgress, Request

if TYPE_CHECKING:
    from carpool.python.workers import WorkerEngine

_KINDS = {"pictures": "image", "videos": "video", "meshes": "mesh", "sound": "sound"}
_FORMATS: dict[Makes, tuple[str, ...]] = {
    "meshes": get_args(MeshFormat),
    "sound": get_args(SoundFormat),
}


def checked(
    card: Card, request: Request | str, n: int, values: Mapping[str, Any]
) -> list[CheckedRequest]:
    """The parts of a job: n outputs of one request.

    Args:
        values: parameters that the request does not set.

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
    work = work_of(
        card.id,
        requests,
        inputs,
        format=format,
        fps=_rate(fps, {**defaults, **requests[0].arguments}),
        told=[file_metadata(card.id, request, settings) for request in requests],
    )
    return _KINDS[makes], work


def _rate(fps: Any, values: Mapping[str, Any]) -> float:
    """Frames a second: explicit, from the request, from the model, or `FPS`."""
    rate = (values.get("frame_rate") or FPS) if fps is None else fps
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    return check_fps(rate if is_number else math.nan, "fps", repr(rate))


class InProcess:
    """Runs the parts of jobs in the engine of this process."""

    def __init__(self, loop: "EngineCore | WorkerEngine", is_alive: Callable[[], bool]) -> None:
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


def write_pictures(record: Record, results: Sequence[Output], folder: Path) -> None:
    """Write the files of a picture job."""
    form = record.work["output"]
    metadata = [
        with_used(settings, result.settings)
        for settings, result in zip(form["told"], results, strict=True)
    ]
    outputs.write_pictures(
        [result.images[0] for result in results], metadata, folder, form["format"]
    )


def write_mesh(record: Record, results: Sequence[Output], folder: Path) -> None:
    """Write the files of a mesh job: `0.glb`, `1.glb`, ..."""
    form = record.work["output"]
    for i, (output, told) in enumerate(zip(results, form["told"], strict=True)):
        if (mesh := output.mesh) is None:
            raise PipelineFailed("the pipeline gave no mesh")
        metadata, format = with_used(told, output.settings), form["format"]
        files = {f"{i}.{format}": encode_mesh(mesh, format, metadata, stem=str(i))}
        for name, content in (files | files_beside(mesh, format, str(i))).items():
            (folder / name).write_bytes(content)


def write_sound(record: Record, results: Sequence[Output], folder: Path) -> None:
    """Write the files of a sound job: `0.wav`, `1.wav`, ..."""
    form = record.work["output"]
    for i, (output, metadata) in enumerate(zip(results, form["told"], strict=True)):
        if (sound := output.sound) is None:
            raise PipelineFailed("the pipeline gave no sound")
        content = encode_sound(sound, form["format"], with_used(metadata, output.settings))
        (folder / f"{i}.{form['format']}").write_bytes(content)


def write_videos(record: Record, results: Sequence[Output], folder: Path) -> None:
    """Write the files of a video job: `0.mp4`, `1.mp4`, ..., with sound if the model makes it."""
    form = record.work["output"]
    for i, (output, settings) in enumerate(zip(results, form["told"], strict=True)):
        [video] = output.frames
        pixels = np.stack([np.asarray(frame.convert("RGB")) for frame in video])
        audio = None if (sound := output.sound) is None else (sound.samples, sound.rate)
        metadata = with_used(settings, {**output.settings, "fps": form["fps"]})
        write_mp4(pixels, form["fps"], audio, folder / f"{i}.mp4", metadata=metadata)


WRITERS = {
    "image": write_pictures,
    "video": write_videos,
    "mesh": write_mesh,
    "sound": write_sound,
}
"""Writers of files by kind of job."""
