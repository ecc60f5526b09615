"""The worker process: an engine behind a socket.

The front gives it one end of a socket pair: it is forked (`forkserver.py`), or started as
`python -m carpool.worker.process FD`. The main
thread reads messages, the engine has its own thread, and a third one writes, so that the engine's
loop never waits for the front. The process ends when the front closes the socket. If it is stopped
or too stuck to notice that, the kernel kills it at the end of the front's process.
"""

import contextlib
import logging
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from carpool.errors import CarpoolError, LoadFailed, PipelineFailed, Released, in_full, reason
from carpool.telemetry import logs, tracing
from carpool.types import CheckedRequest, Event
from carpool.worker import protocol, startup
from carpool.worker.activity import ActivitySender
from carpool.worker.journal_sender import AnswerBatch, JournalSender
from carpool.worker.raw_output import RawOutput, raw_output
from carpool.worker.watchdog import INTERVAL_S

log = logging.getLogger("carpool")


class WorkerProcess:
    """The worker's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._tracing = tracing.Tracing()
        self._at_end: Callable[[], None] = lambda: None
        self._is_ending = threading.Lock()
        self._engine: Any = None  # once the model is loaded
        self._additions: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[protocol.ToFront | AnswerBatch] = queue.SimpleQueue()
        self.answers = JournalSender(self._outbox.put)
        self._in_flight: set[str] = set()  # requests
        self._after_reset: Callable[[], None] | None = None
        self._counting = threading.Lock()
        threading.Thread(target=self._write, name="carpool-write", daemon=True).start()

    def serve(self) -> None:
        """Load what the first message says, then handle messages until the socket closes."""
        first = self._next()
        if not isinstance(first, protocol.LoadModel):
            return
        is_noisy = first.log_level == "debug" and first.log_format == "text" and first.bars
        # these import torch and diffusers, which takes seconds
        from carpool.engine.cost_store import StoredCosts
        from carpool.engine.group.load import load
        from carpool.engine.journal import Journal
        from carpool.engine.loop import EngineCore
        from carpool.engine.model.factory import build
        from carpool.engine.model.load import log_as_others, versions
        from carpool.engine.model.usage import Meter
        from carpool.engine.observe.activity import ActivityLog
        from carpool.engine.observe.co_riders import CoRiders

        began_s = time.monotonic()
        logs.set_up(first.log_level, first.log_format, prompts=first.log_prompts)
        log_as_others(bars=is_noisy)
        co_riders = CoRiders()
        activity = ActivityLog()
        observers = [activity.forward, *([co_riders.forward] if first.otel else [])]
        try:
            if first.otel:
                self._tracing = tracing.start("worker")
            model = first.model if first.factory is None else build(first.factory)
            loaded = load(model, first.settings)
            loaded.device.at_loss = partial(os._exit, 1)  # the front runs its requests again
            table = StoredCosts(loaded, first.settings)
            engine = EngineCore(loaded, first.settings, table=table, observers=observers)
            self._at_end = engine.scheduler.log_last_batches
            engine.after_turn = self.answers.after_turn
        except CarpoolError as error:
            if isinstance(error, LoadFailed) and error.was_killed:
                log.critical("%s", error)
                self.end()  # as if this process had been: it is tried again
            wants_memory = isinstance(error, LoadFailed) and error.wants_memory
            self.send(protocol.LoadFailure(str(error), wants_memory))
            self._next()  # the front closes the socket once it has read this
            return
        meter = Meter(loaded)
        convert = partial(raw_output, pipe=loaded.pipe, spool=first.spool)

        def run() -> None:
            engine.run()  # returns early only if its loop failed: a new worker is better then
            with contextlib.suppress(OSError):  # the front may have closed it already
                self._connection.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=run, name="carpool-engine", daemon=True).start()
        load_s, held = time.monotonic() - began_s, engine.statistics()["memory"]

        digest = _digest(loaded)

        def say_ready() -> None:
            card, free = engine.loaded.card, loaded.device.free_bytes()
            where = held["device"], held["weights_bytes"]
            self.send(protocol.WorkerReady(card, versions(), load_s, *where, free, digest))

        self._engine = engine
        say_ready()
        threading.Thread(target=self._add_in_turn, name="carpool-lora", daemon=True).start()
        viewers = ActivitySender(activity, engine.requests, self.send)
        while (message := self._next()) is not None:
            match message:
                case protocol.Watch(is_on):
                    viewers.watch(is_on)
                case protocol.Submit(request, follow, trace, waited_s, is_journalled, past):
                    self._in_flight.add(request.request_id)
                    try:
                        listener = _RequestListener(
                            self, request, meter.usage(request), convert, follow
                        )
                        if self._tracing.is_on:
                            listener.at_start = partial(co_riders.start, request.request_id, trace)
                            listener.at_end = partial(
                                self._trace, engine, co_riders, trace, request
                            )
                        sink = self.answers.add if is_journalled else None
                        journal = Journal(past, sink) if past or is_journalled else None
                        engine.submit(request, listener, waited_s, journal)
                    except Exception as error:  # such as a tokenizer's: the other requests go on
                        self.send(_failed(request.request_id, error))
                        self.ended(request.request_id)
                case protocol.Reset():
                    viewers.watch(False)
                    engine.scheduler.held_s = 0.0
                    self._reset(engine.cancel, say_ready)
                case protocol.Cancel(request_id):
                    engine.cancel(request_id)
                case protocol.Release(request_id):
                    engine.release(request_id)
                case protocol.Held(work_s):
                    engine.scheduler.held_s = work_s
                case protocol.AddLora(name, path):
                    adding = [engine, partial(_added, engine, name, path)]
                    self._additions.put(adding)
                case protocol.Reload():
                    reading = [engine, engine.reload]
                    threading.Thread(target=self._reload, args=reading, daemon=True).start()
                case protocol.Estimate(request):
                    self.send(protocol.Estimated(*engine.scheduler.admission.estimate(request)))
                case protocol.GetStatistics():
                    self.send(protocol.Statistics(engine.statistics()))
                case protocol.GetTimelines(request_ids):
                    known = [engine.timeline(request_id) for request_id in request_ids]
                    self.send(protocol.Timelines([one for one in known if one is not None]))
        engine.close()

    def _reset(self, cancel: Callable[[str], None], say_ready: Callable[[], None]) -> None:
        """Cancel all requests, and say that the worker is ready once they have ended."""
        with self._counting:
            left = list(self._in_flight)
            self._after_reset = say_ready if left else None
        if not left:
            say_ready()
        for request_id in left:
            cancel(request_id)

    def ended(self, request_id: str) -> None:
        """The last message about a request was sent. On any thread."""
        with self._counting:
            self._in_flight.discard(request_id)
            after, is_last = self._after_reset, not self._in_flight
            if is_last:
                self._after_reset = None
        if is_last and after is not None:
            after()

    def _add_in_turn(self) -> None:
        """Answer the additions of adapters in their order."""
        while True:
            self._reload(*self._additions.get())

    def send_heartbeats(self) -> None:
        """Say every second that the process lives, and how the engine is. Never returns."""
        while True:
            if (engine := self._engine) is None:  # it is being loaded
                self.send(protocol.Heartbeat(0.0, 0.0))
                time.sleep(INTERVAL_S)
                continue
            scheduler = engine.scheduler
            stalled_s, expected_s = engine.heartbeat.read()
            costs = [
                protocol.StepCost(size[0], size[1], size[2], seconds)
                for size, seconds in scheduler.step_costs.items()
            ]
            left, is_streamed = engine.running.steps_left(), engine.loaded.streamer is not None
            replays = [
                protocol.Replayed(one.request_id, one.steps, one.took_s, ago_s)
                for one, ago_s in engine.running.take_replays()
            ]
            report = protocol.Report(costs, left, is_streamed, replays)
            place_s = scheduler.admission.place_s
            self.send(protocol.Heartbeat(stalled_s, expected_s, place_s, report))
            time.sleep(INTERVAL_S)

    def _trace(self, engine: Any, co_riders: Any, trace: str, request: CheckedRequest) -> None:
        shared_with = co_riders.end(request.request_id)
        if (timeline := engine.timeline(request.request_id)) is not None:
            self._tracing.ended(trace, request, timeline, shared_with)

    def _reload(self, engine: Any, read: Callable[[], list[str]]) -> None:
        try:
            problems = read()  # may read gigabytes
        except Exception as error:  # a defect, or an unforeseen file: requests go on
            log.exception("the reload failed")
            problems = [f"{type(error).__name__}: {error}"]
        is_addition = read != engine.reload
        self.send(protocol.Reloaded(engine.loaded.card, problems, is_addition))

    def end(self) -> None:
        """End the process at once, even in the middle of a forward."""
        self._is_ending.acquire()  # for good: the first thread that comes here ends the process
        self._tracing.stop()
        self._at_end()
        os._exit(0)

    def send(self, message: protocol.ToFront) -> None:
        """Queue a message; they arrive in order. Never blocks."""
        self._outbox.put(message)

    def _next(self) -> protocol.ToWorker | None:
        try:
            body = protocol.read(self._connection.recv)
        except ConnectionError:
            return None
        return None if body is None else protocol.decode_to_worker(body)

    def _write(self) -> None:
        while True:
            try:
                message = self._outbox.get()
                if isinstance(message, AnswerBatch):
                    message = message.packed()
                self._connection.sendall(protocol.encode(message))
            except OSError:
                return  # the front is gone; the reading thread sees the end of file


class _RequestListener:
    """Sends the events and the outcome of one request to the front."""

    def __init__(
        self,
        worker: WorkerProcess,
        request: CheckedRequest,
        usage: Future[tuple[int, int]],
        convert: Callable[[Mapping[str, Any]], RawOutput],
        follow: bool,
    ) -> None:
        self._worker, self._request, self._usage = worker, request, usage
        self._convert, self._follow = convert, follow
        self.at_start: Callable[[], None] = lambda: None
        self.at_end: Callable[[], None] = lambda: None

    def event(self, event: Event) -> None:
        if event.kind == "started":
            self.at_start()
            self._worker.send(protocol.Started(event.request_id))
        elif self._follow and event.kind == "step":
            self._worker.send(protocol.Progress(event.request_id, event.step, event.steps))
        elif event.kind == "preview":
            height, width, _ = event.picture.shape
            picture = protocol.Picture(width, height, event.picture.tobytes())
            self._worker.send(protocol.Preview(event.request_id, event.step, event.steps, picture))

    def done(self, outcome: Any) -> None:
        self.at_end()
        if isinstance(outcome.error, Released):
            self._worker.answers.flush()
            self._worker.send(protocol.RequestReleased(self._request.request_id))
            self._worker.ended(self._request.request_id)
            return
        if outcome.error is not None:
            self._worker.send(_failed(self._request.request_id, outcome.error))
            self._worker.ended(self._request.request_id)
            return
        # the tokens of a long prompt may still be counted, which must not delay other outputs
        self._usage.add_done_callback(lambda usage: self._end(outcome, usage))

    def _end(self, outcome: Any, usage: Future[tuple[int, int]]) -> None:
        self._send_output(outcome, usage)
        self._worker.ended(self._request.request_id)

    def _send_output(self, outcome: Any, usage: Future[tuple[int, int]]) -> None:
        request_id, seed = self._request.request_id, self._request.seed
        try:
            pictures, video = self._convert(outcome.fields)
            used = protocol.TokenUsage(*usage.result())
        except Exception as error:
            self._worker.send(_failed(request_id, error))
            return
        self._worker.send(
            protocol.Done(
                request_id, seed, pictures, outcome.timings, used, video,
                warnings=list(outcome.warnings), skipped_steps=outcome.skipped_steps,
            )
        )  # fmt: skip


def _digest(loaded: Any) -> str:
    """What tells the model from those of other workers; empty where that cannot be told."""
    from carpool.engine.journal import model_digest

    try:
        return model_digest(loaded).hex()[:16]
    except Exception:  # of a model that nobody foresaw
        log.exception("the model's digest cannot be made")
        return ""


def _added(engine: Any, name: str, path: str) -> list[str]:
    """Register an adapter. Returns what is wrong with it; nothing if it is there already."""
    if name in engine.loaded.card.lora:
        return []
    try:
        engine.add_lora(name, path)
    except CarpoolError as error:
        return [str(error)]
    return []


def _failed(request_id: str, error: Exception) -> protocol.RequestFailed:
    known = error
    if not isinstance(known, CarpoolError):
        known = PipelineFailed(f"{type(error).__name__}: {reason(error)}")
        known.__cause__ = error
    cause = known.__cause__  # it is not sent to the front
    if cause is not None and (known.status >= 500 or reason(cause) != str(cause)):
        log.error("request %s failed: %s", request_id, in_full(known))
    return protocol.RequestFailed(
        request_id, type(known).__name__, known.message, known.param, known.retry_after_s
    )


def _end_with_front(connection: socket.socket, worker: WorkerProcess) -> None:
    """End the process when the front closes the socket, even while a model is being loaded."""
    hangup = select.poll()
    hangup.register(connection, 0)  # POLLHUP is always reported
    hangup.poll()
    worker.end()


def run(connection: int) -> None:
    """Be a worker: serve the front at the other end of a socket. Never returns."""
    startup.die_with_parent()
    startup.name_process(startup.PROCESS_NAME)
    worker = WorkerProcess(front := socket.socket(fileno=connection))
    threading.Thread(target=_end_with_front, args=[front, worker], daemon=True).start()
    threading.Thread(target=worker.send_heartbeats, name="carpool-heartbeat", daemon=True).start()
    startup.import_engine()
    worker.serve()
    worker.end()


def main() -> None:
    startup.set_environment()
    run(int(sys.argv[1]))


if __name__ == "__main__":
    main()
