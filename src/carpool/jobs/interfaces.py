"""Interfaces of the job runner: engine client, file writer, listener."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from carpool.jobs.database import End, Record
from carpool.types import CheckedRequest, OnProgress, Timings


class JobOutput(Protocol):
    """The output of one request of a job; file writers know more of its fields."""

    @property
    def warnings(self) -> Sequence[str]: ...
    @property
    def timings(self) -> Timings: ...
    @property
    def skipped_steps(self) -> int: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...


OnJobPreview = Callable[[Any], None]
"""Receives the previews of a request that has any; only the worker knows their type."""

Writer = Callable[[Record, Sequence[Any], Path], object]
"""Writes the files of a job into a folder. Runs on a thread."""


class EngineClient(Protocol):
    """Runs the requests of jobs: a pool, a fleet, or an engine in this process."""

    async def wait_open(self, model: str | None = None) -> None: ...
    async def submit(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None = None,
        on_preview: OnJobPreview | None = None,
    ) -> JobOutput: ...


class JobListener:
    """Listener of job events, called on the event loop. Default methods do nothing."""

    def runs(self, record: Record, parts: Sequence[CheckedRequest]) -> None:
        """A job starts, perhaps again, with these requests; called in the job's own task."""

    def progressed(self, record: Record, step: int, steps: int) -> None:
        """The requests of a job have finished `step` of `steps` denoising steps."""

    def previewed(self, record: Record, part: int, preview: Any) -> None:
        """A request of a job has a preview."""

    def ended(
        self,
        record: Record,
        state: End | Literal["completed"],
        took_s: float,
        outputs: Sequence[Any],
    ) -> None:
        """A job has ended, `took_s` after its acceptance; only a completed job has `outputs`."""
