"""An engine's CPU time by part: timers around the functions of each part.

A part counts the CPU time of its thread, without calls into other parts. The timers cost about a
microsecond per call, so a timed run is valid for shares, but not for
totals.
"""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from PIL import Image

from carpool.engine import delivery, running, scheduler
from carpool.engine.describe import Describer
from carpool.engine.fuse import Fuser
from carpool.engine.isolation import RequestContext
from carpool.engine.loop import EngineCore
from carpool.engine.observe.stats import Stats
from carpool.engine.observe.timeline import TimelineStore
from carpool.engine.queue import RequestQueue
from carpool.engine.request import RequestState
from carpool.engine.running import RunningRequests
from carpool.engine.scheduler import Scheduler
from carpool.media import outputs
from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol

LOOP = "the loop itself"
FORWARDS = "forwards"
PIPELINES = "the pipelines' own code"
CONVERTING = "converting outputs (own thread)"
NOT_OURS = (PIPELINES, CONVERTING)
"""Parts that plain diffusers also has."""
WRAPPED: list[tuple[str, Any, tuple[str, ...]]] = [
    (LOOP, EngineCore, ("step",)),
    ("the policy", Scheduler, ("admit", "select")),
    ("learning what forwards take", Scheduler, ("forward", "turned")),
    ("describing calls: fuse keys", Describer, ("describe",)),
    ("stacking calls, splitting answers", Fuser, ("run",)),
    (PIPELINES, RequestState, ("resume",)),
    ("isolation of requests", RequestContext, ("enter", "leave")),
    ("explaining: timelines, counters, events", Stats, ("forward", "step", "start")),
    (
        "explaining: timelines, counters, events",
        TimelineStore,
        ("forward", "parked", "begin", "end"),
    ),
    ("explaining: timelines, counters, events", RunningRequests, ("_tell_step",)),
    ("explaining: timelines, counters, events", scheduler, ("width_reason",)),
    ("starting and ending requests", RunningRequests, ("start", "_end")),
    ("starting and ending requests", running, ("view",)),
    (CONVERTING, delivery, ("finish",)),
    ("queueing (the caller's thread)", RequestQueue, ("put",)),
]


class Parts:
    """Measures CPU seconds by part while installed."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._thread = threading.local()
        self._undo = ExitStack()

    def install(self) -> None:
        for part, owner, names in WRAPPED:
            for name in names:
                plain = getattr(owner, name)
                self._undo.callback(setattr, owner, name, plain)
                setattr(owner, name, self.timed(part, plain))

    def remove(self) -> None:
        self._undo.close()

    def timed(self, part: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to count its CPU time for the part."""

        @functools.wraps(plain)
        def function(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(self._thread, "part", None)
            self._switch(part)
            try:
                return plain(*args, **kwargs)
            finally:
                self._switch(outer)

        return function

    def _switch(self, part: str | None) -> None:
        """Count this thread's time for another part from now on; None: for no part."""
        now_s = time.thread_time()
        before = getattr(self._thread, "part", None)
        if before is not None:
            self.seconds[before] += now_s - self._thread.since_s
        self._thread.part, self._thread.since_s = part, now_s


def of_a_server(picture: Image.Image, request: CheckedRequest, steps: int) -> dict[str, float]:
    """CPU seconds of a request in a server without the engine, each measured separately."""
    message = protocol.Done(
        request.request_id,
        request.seed,
        [protocol.Picture(picture.width, picture.height, picture.tobytes())],
        Timings(),
        protocol.TokenUsage(1, 1),
    )
    progress = protocol.Progress(request.request_id, 1, steps)
    submit = protocol.Submit(request)

    def transport() -> None:
        protocol.decode_to_worker(protocol.encode(submit)[protocol.LENGTH.size :])
        for _ in range(steps):
            protocol.decode_to_front(protocol.encode(progress)[protocol.LENGTH.size :])
        protocol.decode_to_front(protocol.encode(message)[protocol.LENGTH.size :])

    return {
        "transport: messages between front and worker": _best(transport),
        "encoding of files: a PNG": _best(
            lambda: outputs.encode_image(picture, "png", metadata={})
        ),
    }


def _best(work: Callable[[], object], times: int = 50) -> float:
    """The minimum CPU seconds of several runs."""
    durations = []
    for _ in range(times):
        began_s = time.thread_time()
        work()
        durations.append(time.thread_time() - began_s)
    return min(durations)
