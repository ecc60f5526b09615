"""Interfaces of the job runner: engine client, file writer, listener."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from carpool.jobs.database import End, Record
from carpool.types import CheckedRequest, OnProgress, Timings


class JobOutput(Protocol):
    """The output of one request of a job; only file writers read more of it."""

    @property
    def warnings(self) -> Sequence[str]: ...
    @property
    def timings(self) -> Timings: ...
    @property
    def skipped_steps(self) -> int: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...


OnJobPreview = Callable[[Any], None]
"""Is called with previews, of requests that ask for some; only the worker looks into them."""

Writer = Callable[[Record, Sequence[Any], Path], object]
"""Puts the files of a job into a folder. On a thread."""


class EngineClient(Protocol):
    """Runs the requests of jobs: a pool, a fleet, or the engine of this process."""

    async def wait_open(self, model: str | None = None) -> None: ...
    async def submit(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnJobPreview | None = None,
    ) -> JobOutput: ...


class JobListener:
    """Listener of jobs' events, on the event loop. Methods that are not overridden do nothing."""

    def runs(self, record: Record, parts: Sequence[CheckedRequest]) -> None:
        """A job starts to run, maybe again, as these requests; called in the job's own task."""

    def progressed(self, record: Record, step: int, steps: int) -> None:
        """The requests of a job have made so many denoising steps, of so many in all."""

    def previewed(self, record: Record, part: int, preview: Any) -> None:
        """A request of a job has a preview."""

    def ended(
        self,
        record: Record,
        state: End | Literal["completed"],
        took_s: float,
        outputs: Sequence[Any],
    ) -> None:
        """A job has ended, `took_s` after it was accepted; `done` is of a completed one only."""
