"""A request that was submitted, and what it gave."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from carpool.engine.loop import EngineCore
from carpool.engine.request import Outcome
from carpool.errors import CarpoolError
from carpool.types import CheckedRequest, Event, Timings


@dataclass(frozen=True, slots=True)
class Output:
    """What one request gave.

    `images` and `frames` are what the pipeline itself would give for one prompt, in its own default
    output type where none is asked for. For `"pil"` that is a list with one PIL image, or with one
    video as a list of PIL images; for `"np"`, `"pt"` and `"latent"` arrays or tensors of one entry.
    """

    request_id: str
    seed: int | None  # None: rejected before one was drawn
    images: Any = None
    frames: Any = None
    timings: Timings = field(default_factory=Timings)
    error: CarpoolError | None = None  # only with `return_errors=True`
    others: Mapping[str, Any] = field(default_factory=dict)  # further fields of the pipeline


class Handle:
    """A request that was submitted: wait for it, `await` it, follow it, cancel it."""

    def __init__(
        self, job: CheckedRequest, loop: EngineCore, follow: Callable[[Event], object] | None = None
    ) -> None:
        self._job, self._loop, self._follow = job, loop, follow
        self._future: Future[Output] = Future()
        self._events: list[Event] = []
        self._news = threading.Condition()
        self._future.set_running_or_notify_cancel()  # only the engine ends it

    @property
    def request_id(self) -> str:
        return self._job.request_id

    @property
    def seed(self) -> int:
        return self._job.seed

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the output.

        Raises:
            CarpoolError: the request failed, was cancelled, or its `timeout_s` ran out.
            TimeoutError: it goes on, but `timeout` seconds are over.
        """
        return self._future.result(timeout)

    def __await__(self) -> Generator[Any, None, Output]:
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the request within one step. A finished one stays as it is."""
        self._loop.cancel(self.request_id)

    def events(self) -> Iterator[Event]:
        """Everything that happens to the request, from `queued` to `finished`, as it happens."""
        for seen in itertools.count():
            with self._news:
                while len(self._events) <= seen:
                    self._news.wait()
                event = self._events[seen]
            yield event
            if event.kind == "finished":
                return

    # The engine's side (`Listener`)

    def event(self, event: Event) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()
        if self._follow is not None:
            self._follow(event)

    def done(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._future.set_exception(outcome.error)
            return
        fields = dict(outcome.fields)
        self._future.set_result(
            Output(
                request_id=self.request_id,
                seed=self.seed,
                images=fields.pop("images", None),
                frames=fields.pop("frames", None),
                timings=outcome.timings,
                others=fields,
            )
        )
