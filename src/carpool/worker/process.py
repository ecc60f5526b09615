"""An engine in a process of its own, spoken to in frames over a socket.

The front starts it as `python -m carpool.worker.process FD` with one end of a socket pair. The main
thread reads frames, the engine has its own thread, and a third one writes, so that the loop never
waits for the front. The process ends when the front closes the socket, however that came about. One
that is stopped, or stuck where its threads cannot run, is killed by the kernel once the front's
process has ended: none is left behind.
"""

import contextlib
import ctypes
import logging
import os
import queue
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from carpool.errors import CarpoolError, PipelineFailed, in_full, reason
from carpool.telemetry import logs, tracing
from carpool.types import CheckedRequest, Event
from carpool.worker import protocol
from carpool.worker.watchdog import EVERY_S

log = logging.getLogger("carpool")

Made = tuple[list[protocol.Picture], protocol.Clip | None]
_SET_PDEATHSIG = 1  # Linux: prctl(2)


class Worker:
    """The worker's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._tracing = tracing.Tracing()
        self._outbox: queue.SimpleQueue[protocol.ToFront] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="carpool-write", daemon=True).start()

    def serve(self) -> None:
        """Load what the first frame says, then do what the others say until the socket closes."""
        first = self._next()
        if not isinstance(first, protocol.Load):
            return
        if first.log_format == "json":
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read as it is imported
        # Torch and diffusers take seconds to import; the front sees the process start meanwhile.
        from carpool.engine.cost_store import Table
        from carpool.engine.loop import EngineCore
        from carpool.engine.model import pipeline
        from carpool.engine.observe.co_riders import CoRiders

        began_s = time.monotonic()
        logs.set_up(first.log_level, first.log_format, prompts=first.log_prompts)
        pipeline.log_as_others(bars=first.log_format == "text")
        co_riders = CoRiders()
        observers = [co_riders.forward] if first.otel else []
        try:
            if first.otel:
                self._tracing = tracing.start("worker")
            loaded = pipeline.load(first.model, first.settings)
            table = Table(loaded, first.settings)
            engine = EngineCore(loaded, first.settings, table=table, observers=observers)
        except CarpoolError as error:
            self.say(protocol.CannotLoad(str(error)))
            self._next()  # the front hangs up once it has read this
            return
        meter = pipeline.Meter(loaded)
        wrap = partial(_wrapped, pipe=loaded.pipe, passing=first.passing)

        def run() -> None:
            engine.run()  # ends early only if its loop failed: a successor is better then
            with contextlib.suppress(OSError):  # or the front has hung up already
                self._connection.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=run, name="carpool-engine", daemon=True).start()
        self.say(
            protocol.Ready(engine.loaded.card, pipeline.versions(), time.monotonic() - began_s)
        )
        threading.Thread(target=self._beat, args=[engine], name="carpool-beat", daemon=True).start()
        while (frame := self._next()) is not None:
            match frame:
                case protocol.Submit(job, follow, trace):
                    try:
                        follower = _Follower(self, job, meter.usage(job), wrap, follow)
                        if self._tracing.is_on:
                            follower.at_start = partial(co_riders.start, job.request_id, trace)
                            follower.at_end = partial(self._trace, engine, co_riders, trace, job)
                        engine.submit(job, follower)
                    except Exception as error:  # a tokenizer's, say: others ride on
                        self.say(_failed(job.request_id, error))
                case protocol.Cancel(request_id):
                    engine.cancel(request_id)
                case protocol.Reload():
                    threading.Thread(target=self._reload, args=[engine], daemon=True).start()
                case protocol.AskStatistics():
                    self.say(protocol.Statistics(engine.statistics()))
                case protocol.AskLives(request_ids):
                    lives = [engine.timeline(request_id) for request_id in request_ids]
                    self.say(protocol.Lives([life for life in lives if life is not None]))
        engine.close()

    def _beat(self, engine: Any) -> None:
        while True:
            stalled_s, expected_s = engine.heartbeat.read()
            self.say(protocol.Beat(stalled_s, expected_s, engine.place_s))
            time.sleep(EVERY_S)

    def _trace(self, engine: Any, co_riders: Any, trace: str, job: CheckedRequest) -> None:
        with_whom = co_riders.end(job.request_id)
        if (life := engine.timeline(job.request_id)) is not None:
            self._tracing.life(trace, job, life, with_whom)

    def _reload(self, engine: Any) -> None:
        try:
            problems = engine.reload()  # may read gigabytes
        except Exception as error:  # a defect, or a file that nobody thought of: requests ride on
            log.exception("the reload failed")
            problems = [f"{type(error).__name__}: {error}"]
        self.say(protocol.Reloaded(engine.loaded.card, problems))

    def end(self) -> None:
        """End the process at once: nobody is left who could want a running forward's answer."""
        self._tracing.stop()
        os._exit(0)

    def say(self, frame: protocol.ToFront) -> None:
        """Send a frame soon, in order; never blocks."""
        self._outbox.put(frame)

    def _next(self) -> protocol.ToWorker | None:
        try:
            body = protocol.read(self._connection.recv)
        except ConnectionError:
            return None
        return None if body is None else protocol.decode_to_worker(body)

    def _write(self) -> None:
        while True:
            try:
                self._connection.sendall(protocol.encode(self._outbox.get()))
            except OSError:
                return  # the front is gone; the reading thread sees the end of file


class _Follower:
    """Tells the front what happens to one request."""

    def __init__(
        self,
        worker: Worker,
        job: CheckedRequest,
        usage: Future[tuple[int, int]],
        wrap: Callable[[Mapping[str, Any]], Made],
        follow: bool,
    ) -> None:
        self._worker, self._job, self._usage = worker, job, usage
        self._wrap, self._follow = wrap, follow
        self.at_start: Callable[[], None] = lambda: None
        self.at_end: Callable[[], None] = lambda: None

    def event(self, event: Event) -> None:
        if event.kind == "started":
            self.at_start()
            self._worker.say(protocol.Started(event.request_id))
        elif self._follow and event.kind == "step":
            self._worker.say(protocol.Progress(event.request_id, event.step, event.steps))
        elif event.kind == "preview":
            height, width, _ = event.picture.shape
            picture = protocol.Picture(width, height, event.picture.tobytes())
            self._worker.say(protocol.Preview(event.request_id, event.step, event.steps, picture))

    def done(self, outcome: Any) -> None:
        self.at_end()
        if outcome.error is not None:
            self._worker.say(_failed(self._job.request_id, outcome.error))
            return
        # a long prompt may still be counted: that must not hold the outputs of others
        self._usage.add_done_callback(lambda usage: self._tell(outcome, usage))

    def _tell(self, outcome: Any, usage: Future[tuple[int, int]]) -> None:
        request_id, seed = self._job.request_id, self._job.seed
        try:
            pictures, clip = self._wrap(outcome.fields)
            used = protocol.Usage(*usage.result())
        except Exception as error:
            self._worker.say(_failed(request_id, error))
            return
        self._worker.say(protocol.Done(request_id, seed, pictures, outcome.timings, used, clip))


def _wrapped(fields: Mapping[str, Any], *, pipe: Any, passing: str) -> Made:
    """What a pipeline gave, as it crosses to the front."""
    if "frames" not in fields:
        return _pictures(fields), None
    [video] = fields["frames"]
    width, height = video[0].size
    sound, channels, rate = _sound(fields, pipe)
    clip = protocol.Clip(width, height, len(video), b"", sound=sound, channels=channels, rate=rate)
    raw = (frame.convert("RGB").tobytes() for frame in video)
    if passing and 3 * width * height * len(video) > protocol.MOST_INLINE_BYTES:
        handle, clip.path = tempfile.mkstemp(".rgb", dir=passing)
        try:
            with open(handle, "wb") as file:
                file.writelines(raw)
        except OSError:
            Path(clip.path).unlink()
            raise
    else:
        clip.rgb = b"".join(raw)
    return [], clip


def _sound(fields: Mapping[str, Any], pipe: Any) -> tuple[bytes, int, int]:
    """Samples, channels and rate of what is heard in a video: nothing where it is silent."""
    if fields.get("audio") is None:
        return b"", 1, 0
    [samples] = fields["audio"].float()  # (channels, samples)
    rate = int(pipe.vocoder.config.output_sampling_rate)
    return samples.contiguous().numpy().tobytes(), len(samples), rate


def _pictures(fields: Mapping[str, Any]) -> list[protocol.Picture]:
    if not fields.get("images"):
        raise PipelineFailed("the pipeline gave no pictures")
    return [
        protocol.Picture(image.width, image.height, image.convert("RGB").tobytes())
        for image in fields["images"]
    ]


def _failed(request_id: str, error: Exception) -> protocol.Failed:
    known = error
    if not isinstance(known, CarpoolError):
        known = PipelineFailed(f"{type(error).__name__}: {reason(error)}")
        known.__cause__ = error
    cause = known.__cause__  # which does not cross
    if cause is not None and (known.status >= 500 or reason(cause) != str(cause)):
        log.error("request %s failed: %s", request_id, in_full(known))
    return protocol.Failed(
        request_id, type(known).__name__, known.message, known.param, known.retry_after_s
    )


def _end_with(connection: socket.socket, worker: Worker) -> None:
    """End the process once the front hangs up, even while a model is being loaded."""
    hang_ups = select.poll()
    hang_ups.register(connection, 0)  # these need not be asked for
    hang_ups.poll()
    worker.end()


def _die_with_parent() -> None:
    """Have the kernel kill this process at the end of the thread that started it, on Linux.

    A parent that has ended before is not noticed: its socket tells.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl.argtypes = [ctypes.c_int, ctypes.c_ulong]
        prctl(_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _die_with_parent()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        worker = Worker(connection)
        threading.Thread(target=_end_with, args=[connection, worker], daemon=True).start()
        worker.serve()
    worker.end()


if __name__ == "__main__":
    main()
