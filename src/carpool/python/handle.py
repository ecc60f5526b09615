"""Handles: follow, await or cancel a submitted request; its output."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from carpool.artifacts import Mesh, Sound
from carpool.engine.loop import EngineCore
from carpool.engine.model.artifacts import mesh_of, sound_of
from carpool.engine.request import Outcome
from carpool.errors import CarpoolError, Forked
from carpool.types import CheckedRequest, Event, Timings

log = logging.getLogger("carpool")

if TYPE_CHECKING:
    from PIL import Image

    from carpool.python.workers import WorkerEngine

OnEvent = Callable[[Event], object]
Loop: TypeAlias = "EngineCore | WorkerEngine"
"""Runs the requests of an engine: in this process, or in workers."""


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one request.

    `images` and `frames` equal the pipeline's own output for one prompt, by default in its own
    output type. `"pil"`: a list with one PIL image, or with one video as a list of PIL images;
    `"np"`, `"pt"` and `"latent"`: arrays or tensors with one entry.
    """

    request_id: str
    seed: int | None  # None: rejected before a seed was drawn
    images: "list[Image.Image] | Any" = None  # None if the model makes videos
    frames: "list[list[Image.Image]] | Any" = None  # None if it makes pictures
    timings: Timings = field(default_factory=Timings)
    error: CarpoolError | None = None  # only with `return_errors=True`
    others: Mapping[str, Any] = field(default_factory=dict)  # further fields of the pipeline
    warnings: tuple[str, ...] = ()  # for example a truncated prompt
    skipped_steps: int = 0  # steps that `step_cache` skipped
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings as used

    def _repr_html_(self) -> str | None:
        """Pictures or clip as HTML for notebooks; None for arrays."""
        from carpool.python.notebook import as_html

        return as_html(self)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh as arrays; `carpool.media.encode_mesh` makes files."""
        return mesh_of({"images": self.images, **self.others})

    @property
    def text(self) -> str | None:
        """The text that a language model wrote."""
        text = self.others.get("text")
        return text if isinstance(text, str) else None

    @property
    def sound(self) -> Sound | None:
        """The sound as samples; `carpool.media.encode_sound` makes files."""
        return sound_of(self.others)


def check_owner(pid: int) -> None:
    """Raise `Forked` outside of the engine's process.

    A fork has the engine's memory, but not its threads, so it would wait endlessly.
    """
    if os.getpid() != pid:
        raise Forked(
            f"the engine runs in process {pid}, and this is its fork {os.getpid()}, "
            "without the engine's thread: load the model in the child, start children by "
            "'spawn', or use `carpool serve`"
        )


class Handle:
    """A submitted request: wait for it, `await` it, follow it, cancel it.

    Iteration, with `for` or `async for`, yields its events.
    """

    def __init__(self, request: CheckedRequest, loop: Loop, follow: OnEvent | None = None) -> None:
        """Submit the request.

        Args:
            follow: called with every event, on a thread of the engine.

        Raises:
            TooLate, Overloaded, Draining: see `EngineCore.submit`.
        """
        self._request, self._loop, self._pid = request, loop, os.getpid()
        self._listener = _Listener(request, follow)
        loop.submit(request, self._listener)

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def seed(self) -> int:
        return self._request.seed

    def __repr__(self) -> str:
        return f"<carpool.Handle {self.request_id} seed={self.seed} {self._listener.state}>"

    def done(self) -> bool:
        """Return whether the request has ended, with an output, an error or a cancellation."""
        return self._listener.future.done()

    def result(self, timeout: float | None = None) -> Output:
        """Wait for the output.

        Raises:
            CarpoolError: the request failed, was cancelled, or its `timeout_s` ran out.
            TimeoutError: `timeout` seconds have passed; the request continues.
        """
        if not self.done():
            check_owner(self._pid)
        return self._listener.future.result(timeout)

    def __await__(self) -> Generator[Any, None, Output]:
        if not self.done():
            check_owner(self._pid)
        try:
            return (yield from asyncio.wrap_future(self._listener.future).__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the request within one step. No effect on a finished request."""
        check_owner(self._pid)
        self._loop.cancel(self.request_id)

    def events(self) -> Iterator[Event]:
        """Yield the events of the request as they happen, from `queued` to `finished`."""
        check_owner(self._pid)
        return self._listener.events()

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def __aiter__(self) -> AsyncIterator[Event]:
        check_owner(self._pid)
        return self._listener.events_async()


class _Listener:
    """The engine's side of a handle."""

    def __init__(self, request: CheckedRequest, follow: OnEvent | None) -> None:
        self._request, self._follow = request, follow
        self.future: Future[Output] = Future()
        self._events: list[Event] = []
        self._queues: list[OnEvent] = []  # queues of live iterations
        self._lock = threading.Lock()
        self.future.set_running_or_notify_cancel()  # only the engine may end it

    @property
    def state(self) -> str:
        """A short text for `repr`."""
        if self.future.done():
            error = self.future.exception()
            return "done" if error is None else f"failed: {type(error).__name__}"
        last = self._events[-1] if self._events else None
        if last is None or last.kind == "queued":
            return "queued"
        return f"step {last.step} of {last.steps}" if last.steps else last.kind

    def _subscribe(self, put: OnEvent) -> None:
        """Pass all events to a queue, from the first."""
        with self._lock:
            for event in self._events:
                put(event)
            self._queues.append(put)

    def events(self) -> Iterator[Event]:
        events: SimpleQueue[Event] = SimpleQueue()
        self._subscribe(events.put)
        while (event := events.get()).kind != "finished":
            yield event
        yield event

    async def events_async(self) -> AsyncIterator[Event]:
        events, here = asyncio.Queue[Event](), asyncio.get_running_loop()

        def put(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                here.call_soon_threadsafe(events.put_nowait, event)

        self._subscribe(put)
        while (event := await events.get()).kind != "finished":
            yield event
        yield event

    def event(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            for put in self._queues:
                put(event)
        if self._follow is not None:
            try:
                self._follow(event)
            except Exception:  # all requests share this thread
                log.exception("the callback of %s failed: events stop", self._request.request_id)
                self._follow = None

    def done(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self.future.set_exception(outcome.error)
            return
        fields = dict(outcome.fields)
        output = Output(
            self._request.request_id, self._request.seed,
            fields.pop("images", None), fields.pop("frames", None), outcome.timings,
            others=fields, warnings=outcome.warnings,
            skipped_steps=outcome.skipped_steps, settings=outcome.settings,
        )  # fmt: skip
        self.future.set_result(output)
