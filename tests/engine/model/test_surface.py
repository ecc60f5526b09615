"""Surfaces are extracted beside the loop, with progress; they are cancelled, late, and fail."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from PIL import Image

from carpool.engine.model.artifacts import mesh_of
from carpool.errors import Cancelled, DeadlineExceeded, NoSurface
from support.engine_driver import Drive, Recorder, VirtualClock, driving
from support.mesh_pipeline import SurfacePipeline, mesh_pipeline

PICTURE = Image.new("RGB", (8, 8), "red")


@contextmanager
def extracting(**options: Any) -> Iterator[tuple[Drive, Recorder, list[Callable[[], None]]]]:
    """A drive, a request of two steps whose surface is about to be extracted, and that work."""
    with driving(mesh_pipeline(SurfacePipeline), **options) as drive:
        work: list[Callable[[], None]] = []
        drive.engine.parts.off_loop.host = work.append
        recorder = drive.submit(
            None, image=PICTURE, num_inference_steps=2, timeout_s=60.0, request_id="a"
        )
        drive.turn_until(lambda: bool(work))
        yield drive, recorder, work


def test_the_parts_of_a_surface_are_told_after_the_steps_and_others_run_meanwhile() -> None:
    with extracting() as (drive, recorder, work):
        other = drive.submit(None, image=PICTURE, seed=1, num_inference_steps=3)
        drive.turn_until(lambda: len(work) == 2)
        between = drive.engine.timeline("a")
        running = {entry.request_id: entry for entry in drive.engine.requests().running}
        for extract in work:
            extract()
        drive.finish()
        timeline = drive.engine.timeline("a")

    assert between is not None
    assert timeline is not None
    assert (timeline["status"], timeline["surface"]) == ("ok", 1.0)
    assert (between["steps"], between["surface"], running["a"].steps) == (2, 0.0, 10)
    told = [(event.step, event.steps) for event in recorder.events if event.kind == "step"]
    assert told == [(1, 10), (2, 10), (4, 10), (6, 10), (8, 10), (10, 10)]
    assert [mesh_of(ended.outcome.fields) is None for ended in (recorder, other)] == [False, False]


@pytest.mark.parametrize("error", [Cancelled, DeadlineExceeded])
def test_a_request_that_ends_in_its_extraction_ends_at_once_and_that_work_too(
    error: type[Exception],
) -> None:
    clock = VirtualClock()
    with extracting(clock=clock) as (drive, recorder, work):
        if error is Cancelled:
            drive.engine.cancel("a")
        else:
            clock.pass_by(61.0)
        drive.turn()
        assert isinstance(recorder.error, error)
        told = len(recorder.events)
        work.pop()()  # ends at its first chunk
        drive.finish()

    assert (len(recorder.events), len(recorder.outcomes)) == (told, 1)


@pytest.mark.parametrize("isolation", ["auto", "private"])
def test_a_shape_without_a_surface_fails_alone_and_once(isolation: str) -> None:
    with driving(mesh_pipeline(SurfacePipeline), isolation=isolation) as drive:
        empty, whole = (
            drive.submit(None, image=PICTURE, num_inference_steps=2, is_empty=is_empty)
            for is_empty in (True, False)
        )
        drive.finish()

    assert isinstance(empty.error, NoSurface)
    assert str(empty.error) == "the shape has no surface"
    assert whole.error is None
    assert not drive.second_runs
