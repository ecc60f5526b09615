"""The engine of a worker process, and its answers to messages from the front."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import convert

from carpool.errors import CarpoolError, named
from carpool.telemetry import tracing
from carpool.telemetry.activity import Snapshot
from carpool.types import CheckedRequest
from carpool.worker import protocol
from carpool.worker.raw_output import raw_output
from carpool.worker.request_listener import LastMessage, RequestListener, failed
from carpool.worker.update_sender import UpdateSender

if TYPE_CHECKING:  # imports torch
    from carpool.engine.loop import EngineCore
    from carpool.engine.model.loaded import LoadedPipeline

log = logging.getLogger("carpool")


class OpenRequests:
    """The ids of unfinished requests. From any thread."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._after_reset: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def add(self, request_id: str) -> None:
        self._ids.add(request_id)

    def ended(self, request_id: str) -> None:
        """Remove a request after its last message."""
        with self._lock:
            self._ids.discard(request_id)
            after, is_last = self._after_reset, not self._ids
            if is_last:
                self._after_reset = None
        if is_last and after is not None:
            after()

    def reset(self, cancel: Callable[[str], None], after: Callable[[], None]) -> None:
        """Cancel all requests, and call `after` when they have ended."""
        with self._lock:
            open_ids = list(self._ids)
            self._after_reset = after if open_ids else None
        if not open_ids:
            after()
        for request_id in open_ids:
            cancel(request_id)


class MessageHandler:
    """A loaded model with its engine. Messages are handled on the thread that reads them.

    Args:
        message: the model to load.
        send: queues a message to the front; must not block.
        updates: sends progress, and answers of calls.
        spans: writes traces.

    Raises:
        CarpoolError: the model cannot be loaded.
    """

    def __init__(
        self,
        message: protocol.LoadModel,
        send: Callable[[protocol.ToFront], None],
        updates: UpdateSender,
        spans: tracing.Tracing,
    ) -> None:
        # imports torch and diffusers, which takes seconds
        from carpool.engine.cost_store import StoredCosts
        from carpool.engine.group.load import load
        from carpool.engine.loop import EngineCore
        from carpool.engine.model.factory import build
        from carpool.engine.model.libraries import log_as_others, versions
        from carpool.engine.model.usage import Meter
        from carpool.engine.observe.activity import ActivityLog
        from carpool.engine.observe.co_riders import CoRiders

        began_s = time.monotonic()
        is_noisy = message.log_level == "debug" and message.log_format == "text" and message.bars
        log_as_others(bars=is_noisy)
        self._send, self._updates, self._spans = send, updates, spans
        self._co_riders, self._activity, self._was_idle = CoRiders(), ActivityLog(), False
        observers = [self._activity.forward, *([self._co_riders.forward] if message.otel else [])]
        model = message.model if message.factory is None else build(message.factory)
        loaded = load(model, message.settings)
        loaded.device.at_loss = partial(os._exit, 1)  # the front runs its requests again
        table = StoredCosts(loaded, message.settings)
        self.engine = EngineCore(
            loaded, message.settings, table=table, observers=observers,
            is_restart=message.is_restart, deadlock=message.deadlock,
        )  # fmt: skip
        self.engine.at_deadlock = lambda place: send(protocol.Deadlocked(place))
        self._meter = Meter(loaded)
        self._convert = partial(raw_output, spool=message.spool)
        self._requests = OpenRequests()
        self._adding: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        load_s, self._statistics = time.monotonic() - began_s, self.engine.statistics()
        memory = self._statistics["memory"]
        self._ready = protocol.WorkerReady(
            loaded.card, versions(), load_s, memory["device"], memory["weights_bytes"],
            model_digest=_digest(loaded),
        )  # fmt: skip

    def start(self, at_end: Callable[[], None]) -> None:
        """Start the engine's thread, and report that the worker is ready.

        Args:
            at_end: called when the engine has ended, even early after a failure of its loop.
        """

        def run() -> None:
            try:
                self.engine.run()
            finally:
                at_end()

        threading.Thread(target=run, name="carpool-engine", daemon=True).start()
        self._send_ready()
        threading.Thread(target=self._add_in_turn, name="carpool-lora", daemon=True).start()

    def close(self) -> None:
        self.engine.close()

    def handle(self, message: protocol.ToWorker) -> None:
        engine = self.engine
        match message:
            case protocol.Submit():
                self._submit(message)
            case protocol.Cancel(request_id):
                engine.cancel(request_id)
            case protocol.Release(request_id):
                engine.release(request_id)
            case protocol.Reset():
                self._watch(is_on=False)
                engine.hold(0.0)
                self._requests.reset(engine.cancel, self._send_ready)
            case protocol.Held(work_s):
                engine.hold(work_s)
            case protocol.Watch(is_on):
                self._watch(is_on=is_on)
            case protocol.Reload():
                threading.Thread(target=self._reload, args=[engine.reload], daemon=True).start()
            case protocol.Ask(number, protocol.AddLora(name, path)):
                self._adding.put(partial(self._add_lora, number, name, path))
            case protocol.Ask(number, query):
                self._send(protocol.Answer(number, self._answer(query)))

    def _answer(self, query: protocol.Query) -> Any:
        engine = self.engine
        match query:
            case protocol.Estimate(request):
                unknown: tuple[float | None, float, float] = (None, 0.0, 1.0)
                return engine.contain("predict", unknown, engine.estimate, request)
            case protocol.GetStatistics():
                self._statistics = engine.contain("count", self._statistics, engine.statistics)
                return self._statistics
            case protocol.GetTimelines(request_ids):
                look = partial(engine.contain, "timeline", None, engine.timeline)
                return [line for line in map(look, request_ids) if line is not None]

    def heartbeat(self) -> protocol.Heartbeat:
        """The engine's progress, and the report for the front's router."""
        report = self.engine.contain("count", None, self._report)
        return protocol.Heartbeat(*self.engine.progress(), report)

    def activity(self) -> protocol.Activity | None:
        """The engine's activity since the last call; None: not watched, or idle again."""
        if not self._activity.is_on:
            return None
        forwards, missed = self._activity.take()
        empty = Snapshot(0.0, (), (), 0)
        now = self.engine.contain("count", empty, self.engine.requests)
        was_idle, self._was_idle = self._was_idle, not (forwards or now.running or now.waiting)
        return None if was_idle and self._was_idle else protocol.Activity(now, forwards, missed)

    def _watch(self, *, is_on: bool) -> None:
        self._activity.is_on, self._was_idle = is_on, False

    def _report(self) -> protocol.Report | None:
        return convert(self.engine.load_report(), protocol.Report, from_attributes=True)

    def _send_ready(self) -> None:
        self._send(self._ready.now(self.engine.card, free_bytes=self.engine.free_bytes()))

    def _submit(self, message: protocol.Submit) -> None:
        from carpool.engine.journal import Journal

        request = message.request
        self._requests.add(request.request_id)
        try:
            updates, usage = self._updates, self._meter.usage(request)
            listener = RequestListener(
                request, usage, self._convert, send=self._send, end=self._end,
                step=updates.add_step if message.follow else None,
            )  # fmt: skip
            if self._spans.is_on:
                begin = self._co_riders.start
                listener.at_start = partial(begin, request.request_id, message.trace)
                trace = partial(self._trace, message.trace, request)
                listener.at_end = partial(self.engine.contain, "count", None, trace)
            journal = Journal(message.journal) if message.journal else None
            if message.is_journalled:
                notes = updates.add, updates.add_passed, updates.replayed
                journal = Journal(message.journal, *notes)
            waited_s, is_admitted = message.waited_s, message.is_admitted
            self.engine.submit(request, listener, waited_s, journal, is_admitted=is_admitted)
        except BaseException as error:  # such as a tokenizer's error: other requests continue
            self._end(failed(request.request_id, error))

    def _end(self, message: LastMessage) -> None:
        """Send the last message about a request. On any thread."""
        if isinstance(message, protocol.RequestReleased):
            self._updates.flush()
        self._updates.ends(message.request_id)
        self._send(message)
        self._requests.ended(message.request_id)

    def _trace(self, trace: str, request: CheckedRequest) -> None:
        shared_with = self._co_riders.end(request.request_id)
        if (timeline := self.engine.timeline(request.request_id)) is not None:
            self._spans.ended(trace, request, timeline, shared_with)

    def _add_in_turn(self) -> None:
        """Add adapters in order of arrival."""
        while True:
            self._adding.get()()

    def _add_lora(self, number: int, name: str, path: str) -> None:
        problems = self._reload(partial(_add_lora, self.engine, name, path))
        self._send(protocol.Answer(number, problems))

    def _reload(self, read: Callable[[], list[str]]) -> list[str]:
        try:
            problems = read()  # may read gigabytes
        except Exception as error:  # a defect, or an unexpected file: requests continue
            log.exception("the reload failed")
            problems = [named(error)]
        self._send(protocol.Reloaded(self.engine.card, problems))
        return problems


def _digest(loaded: "LoadedPipeline") -> str:
    """The digest of the model, equal in all workers that loaded it; empty: not available."""
    from carpool.engine.identity import identity_of_answers

    try:
        return identity_of_answers(loaded).hex()[:16]
    except Exception:  # an unexpected model
        log.exception("the model's digest cannot be computed")
        return ""


def _add_lora(engine: "EngineCore", name: str, path: str) -> list[str]:
    """Register an adapter. Returns its problems; none if it is already registered."""
    if name in engine.card.lora:
        return []
    try:
        engine.add_lora(name, path)
    except CarpoolError as error:
        return [str(error)]
    return []
