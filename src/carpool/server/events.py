"""`GET /v1/events`: activity of the engine and of a client's own jobs, as server-sent events.

Requests of other API keys appear by number only: never their ids, prompts, settings or pictures.
The worker reports, and events are encoded, only while viewers are connected; each event is encoded
once for all viewers of a key.

    status    the server's state, model and version
    activity  finished forwards, running and waiting requests, and moves between workers; about
              four times a second
    stats     counters of the engine, every two seconds
    job       a job of the client began, made steps, or ended
    prompt    a job's prompt while a language model rewrites it, up to the newest word
    preview   a job's picture while it is denoised
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

import carpool
from carpool import media
from carpool.errors import CarpoolError, Overloaded
from carpool.fleet.fleet import Fleet
from carpool.jobs.database import Record
from carpool.jobs.interfaces import JobListener, JobOutput
from carpool.jobs.runner import Runner
from carpool.media.executors import FairExecutor
from carpool.server.observer import Observer
from carpool.telemetry.activity import RunningRequest, WaitingRequest
from carpool.telemetry.worker_statistics import models_of, workers_of
from carpool.types import CheckedRequest
from carpool.worker import protocol

MOST_VIEWERS = 64  # viewers of one API key
TICK_S = 0.25
STATISTICS_EVERY = 8  # ticks
BUFFERED = 256  # unread events of a viewer; more disconnect it
PREVIEW_QUALITY = 80
SILENCE_S = 15.0  # longest gap between events
_STATISTICS = """waiting running requests steps steps_per_s tokens forwards waits not_wider costs
overload memory speed_factor deadlines_missed"""
SHOWN_STATISTICS = _STATISTICS.split()
"""The engine's statistics for viewers; `/stats` has the rest."""


@dataclass(slots=True, eq=False)
class _Viewer:
    owner: str
    events: "asyncio.Queue[bytes | None]" = field(
        default_factory=lambda: asyncio.Queue(maxsize=BUFFERED)
    )

    def put(self, event: bytes | None) -> None:
        if self.events.full():
            while not self.events.empty():
                self.events.get_nowait()
            event = None  # ends its stream
        self.events.put_nowait(event)


class Events(JobListener):
    """Distributes events to viewers. Runs on the event loop.

    Args:
        knows: returns whether an owner's key is still valid.
        encoder: encodes previews.
        has_metadata: whether files state that a model made them.
    """

    def __init__(
        self,
        fleet: Fleet,
        observer: Observer,
        runner: Runner,
        *,
        knows: Callable[[str], bool],
        encoder: FairExecutor,
        has_metadata: bool = True,
    ) -> None:
        self._fleet, self._observer = fleet, observer
        self._knows, self._encoder = knows, encoder
        self._metadata: dict[str, Any] | None = {} if has_metadata else None
        self._viewers: dict[_Viewer, None] = {}
        self._progress: dict[str, tuple[Record, int, int]] = {}  # jobs since the last tick
        self._ticking: asyncio.Task[None] | None = None
        self._encoding: set[asyncio.Task[None]] = set()
        self._is_closed = False
        runner.listen(self)

    async def follow(self, owner: str, for_s: float | None = None) -> AsyncIterator[bytes]:
        """Stream events to one viewer, from now on.

        Args:
            for_s: duration; None: until the viewer or server closes it.

        Raises:
            Overloaded: the key has its maximum of viewers.
        """
        if sum(viewer.owner == owner for viewer in self._viewers) >= MOST_VIEWERS:
            rule = f"{MOST_VIEWERS} streams of events are open already, the limit of one key"
            raise Overloaded(f"{rule}: close one", retry_after_s=5)
        viewer = _Viewer(owner)
        viewer.put(self._status())
        self._viewers[viewer] = None
        self._update()
        try:
            now_s = asyncio.get_running_loop().time
            until_s, is_first = inf if for_s is None else now_s() + for_s, True
            while not self._is_closed and (is_first or now_s() < until_s):
                left_s, is_first = until_s - now_s(), False
                try:
                    async with asyncio.timeout(max(0.0, min(SILENCE_S, left_s))):
                        event = await viewer.events.get()
                except TimeoutError:
                    event = KEEPALIVE_COMMENT
                if event is None or not self._knows(owner):
                    return
                yield event
        finally:
            del self._viewers[viewer]
            self._update()

    def close(self) -> None:
        """End all streams, because the server stops."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.put(None)

    def _update(self) -> None:
        """Start watching the engine for the first viewer; stop after the last viewer."""
        if self._viewers and self._ticking is None:
            self._fleet.watch_activity(self._activity)
            self._ticking = asyncio.create_task(self._tick())
        elif not self._viewers and self._ticking is not None:
            self._fleet.watch_activity(None)
            self._ticking.cancel()
            self._ticking = None
            self._progress.clear()

    async def _tick(self) -> None:
        """Send periodic events: progress, changes of state, statistics."""
        status_sent, asking = self._status(), None
        count = 0
        while True:
            if (status := self._status()) != status_sent:
                status_sent = status
                self._send(None, status)
            if count % STATISTICS_EVERY == 0 and (asking is None or asking.done()):
                asking = asyncio.create_task(self._send_statistics())
            progress, self._progress = self._progress, {}
            for record, step, steps in progress.values():
                self._send_job(record, "in_progress", step=step, steps=steps)
            count += 1
            await asyncio.sleep(TICK_S)

    async def _send_statistics(self) -> None:
        if self._fleet.state not in ("ready", "draining"):
            return
        try:
            async with asyncio.timeout(10):
                statistics = await self._fleet.statistics()
        except (CarpoolError, TimeoutError):  # the worker died or is busy
            return
        name = self._observer.model
        models = models_of(name, statistics)
        for worker in workers_of(name, statistics):
            about = {"model": worker.model, "worker": int(worker.worker or 0)}
            if held_work := models[worker.model].get("held"):
                about["held"] = held_work["requests"]
            counts = worker.statistics
            fields = {key: counts[key] for key in SHOWN_STATISTICS if key in counts}
            self._send(None, _event("stats", about | fields))

    def _status(self) -> bytes:
        status = {"status": self._fleet.state, "model": self._observer.model}
        return _event("status", {**status, "version": carpool.__version__})

    def _activity(self, activity: protocol.Activity) -> None:
        forwards = [
            asdict(run) | {"began_s": round(run.began_s, 5), "duration_s": round(run.duration_s, 6)}
            for run in activity.forwards
        ]
        now = activity.requests
        common = {
            "model": activity.model or self._observer.model, "worker": activity.worker,
            "now_s": round(now.now_s, 5), "forwards": forwards, "missed": activity.missed,
            "waiting_count": now.waiting_count,
        }  # fmt: skip
        for owner in {viewer.owner for viewer in self._viewers}:
            running = [self._shown(request, owner) for request in now.running]
            waiting = [self._shown(request, owner) for request in now.waiting]
            moves = [
                {
                    "at": round(move.at, 3), "from": move.from_worker, "to": move.to_worker,
                    "why": move.why, **self._own(move.request_id, owner),
                }
                for move in activity.moves
            ]  # fmt: skip
            requests = {"running": running, "waiting": waiting, "moves": moves}
            event = _event("activity", {**common, **requests})
            self._send(owner, event)

    def _shown(self, request: RunningRequest | WaitingRequest, owner: str) -> dict[str, Any]:
        """A request for a viewer, with times in milliseconds' precision."""
        fields = asdict(request)
        own = self._own(fields.pop("request_id"), owner)
        times = {name: s and round(s, 3) for name, s in fields.items() if name.endswith("_s")}
        return fields | times | own

    def _own(self, request_id: str, owner: str) -> dict[str, Any]:
        """Name the request of an output, if the viewer owns it."""
        name = self._observer.own_name(request_id, owner)
        return {} if name is None else {"id": name[0], "part": name[1]}

    # Methods of `JobListener`

    def runs(self, record: Record, parts: Sequence[CheckedRequest]) -> None:
        self._send_job(record, "in_progress", parts=len(parts))

    def ended(self, record: Record, state: str, took_s: float, _: Sequence[JobOutput]) -> None:
        self._progress.pop(record.id, None)
        self._send_job(record, state)

    def progressed(self, record: Record, step: int, steps: int) -> None:
        if self._viewers:
            self._progress[record.id] = record, step, steps

    def previewed(self, record: Record, part: int, preview: Any) -> None:
        if any(viewer.owner == record.owner for viewer in self._viewers):
            task = asyncio.create_task(self._send_preview(record, part, preview))
            self._encoding.add(task)
            task.add_done_callback(self._encoding.discard)

    async def _send_preview(self, record: Record, part: int, preview: protocol.Preview) -> None:
        if preview.picture is None:  # the only text of a job is its prompt
            fields = {"id": record.id, "part": part, "text": preview.text}
            self._send(record.owner, _event("prompt", fields))
            return
        encode = partial(
            media.encode_image, preview.picture, "webp", PREVIEW_QUALITY, self._metadata
        )
        picture = await self._encoder.run(record.owner, encode)
        fields = {"id": record.id, "part": part, "step": preview.step, "steps": preview.steps}
        fields["webp"] = base64.b64encode(picture).decode()
        self._send(record.owner, _event("preview", fields))

    def _send_job(self, record: Record, status: str, **extra: int) -> None:
        if self._viewers:
            self._send(record.owner, _event("job", {"id": record.id, "status": status, **extra}))

    def _send(self, owner: str | None, event: bytes) -> None:
        """Send an event to the viewers of an owner; None: to all."""
        for viewer in self._viewers:
            if owner in (None, viewer.owner):
                viewer.put(event)


def _event(kind: str, data: Any) -> bytes:
    return format_sse_event(data_str=json.dumps(data, separators=(",", ":")), event=kind)
