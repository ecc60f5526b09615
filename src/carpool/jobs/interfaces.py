"""What a runner of jobs is given: who runs requests, who writes files, and who is told."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from carpool.jobs.database import End, Record
from carpool.types import CheckedRequest, OnProgress, Timings


class JobOutput(Protocol):
    """What a worker gives for one request of a job; only the writers look further into it."""

    @property
    def warnings(self) -> Sequence[str]: ...
    @property
    def timings(self) -> Timings: ...
    @property
    def skipped_steps(self) -> int: ...


OnPreview = Callable[[Any], None]
"""Is called with previews, of requests that ask for some; only the worker looks into them."""

Writer = Callable[[Record, Sequence[Any], Path], object]
"""Puts the files of a job into a folder. On a thread."""


class EngineClient(Protocol):
    """Runs the requests of jobs: a `Supervisor`, or a test's own."""

    async def wait_open(self, model: str | None = None) -> None: ...
    async def submit(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
    ) -> JobOutput: ...


class JobListener:
    """Is told what becomes of jobs, on the event loop. What is not overridden does nothing."""

    def runs(self, record: Record, parts: Sequence[CheckedRequest]) -> None:
        """A job is run, maybe not for the first time, as these requests; in their own task."""

    def progressed(self, record: Record, step: int, steps: int) -> None:
        """The requests of a job have made so many denoising steps, of so many in all."""

    def previewed(self, record: Record, part: int, preview: Any) -> None:
        """There is a preview of one of the requests of a job."""

    def ended(
        self,
        record: Record,
        state: End | Literal["completed"],
        took_s: float,
        done: Sequence[Any],
    ) -> None:
        """A job has ended, `took_s` after it was accepted; `done` is of a completed one only."""
