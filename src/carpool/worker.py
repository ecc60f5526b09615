"""An engine in a process of its own, spoken to in frames over a socket.

The front starts it as `python -m carpool.worker FD` with one end of a socket pair. The main
thread reads frames, the engine has its own thread, and a third one writes, so that the loop never
waits for the front. The process ends when the front closes the socket, however that came about:
none is left behind.
"""

import contextlib
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from carpool import frames
from carpool.errors import CarpoolError, PipelineFailed
from carpool.types import Event, Job


class Worker:
    """The worker's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox: queue.SimpleQueue[frames.ToFront] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="carpool-write", daemon=True).start()

    def serve(self) -> None:
        """Load what the first frame says, then do what the others say until the socket closes."""
        first = self._next()
        if not isinstance(first, frames.Load):
            return
        # Torch and diffusers take seconds to import; the front sees the process start meanwhile.
        from carpool.engine import pipeline
        from carpool.engine.learned import Table
        from carpool.engine.loop import Engine

        began_s = time.monotonic()
        try:
            loaded = pipeline.load(first.model, first.settings)
            engine = Engine(loaded, first.settings, table=Table(loaded, first.settings))
        except CarpoolError as error:
            self.say(frames.CannotLoad(str(error)))
            self._next()  # the front hangs up once it has read this
            return
        meter = pipeline.Meter(loaded)

        def run() -> None:
            engine.run()  # ends early only if its loop failed: a successor is better then
            with contextlib.suppress(OSError):  # or the front has hung up already
                self._connection.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=run, name="carpool-engine", daemon=True).start()
        self.say(frames.Ready(engine.loaded.card, pipeline.versions(), time.monotonic() - began_s))
        while (frame := self._next()) is not None:
            match frame:
                case frames.Submit(job):
                    try:
                        usage = frames.Usage(*meter.usage(job))
                        engine.submit(job, _Follower(self, job, usage))
                    except Exception as error:  # a tokenizer's, say: others ride on
                        self.say(_failed(job.request_id, error))
                case frames.Cancel(request_id):
                    engine.cancel(request_id)
                case frames.AskStatistics():
                    self.say(frames.Statistics(engine.statistics()))
        engine.close()

    def say(self, frame: frames.ToFront) -> None:
        """Send a frame soon, in order; never blocks."""
        self._outbox.put(frame)

    def _next(self) -> frames.ToWorker | None:
        try:
            body = frames.read(self._connection.recv)
        except ConnectionError:
            return None
        return None if body is None else frames.decode_to_worker(body)

    def _write(self) -> None:
        while True:
            try:
                self._connection.sendall(frames.encode(self._outbox.get()))
            except OSError:
                return  # the front is gone; the reading thread sees the end of file


class _Follower:
    """Tells the front what happens to one request."""

    def __init__(self, worker: Worker, job: Job, usage: frames.Usage) -> None:
        self._worker, self._job, self._usage = worker, job, usage

    def event(self, event: Event) -> None:
        """Progress is not told to HTTP clients yet."""

    def done(self, outcome: Any) -> None:
        if outcome.error is not None:
            self._worker.say(_failed(self._job.request_id, outcome.error))
            return
        try:
            pictures = _pictures(outcome.fields)
        except Exception as error:
            self._worker.say(_failed(self._job.request_id, error))
            return
        self._worker.say(
            frames.Done(
                self._job.request_id, self._job.seed, pictures, outcome.timings, self._usage
            )
        )


def _pictures(fields: Mapping[str, Any]) -> list[frames.Picture]:
    if not fields.get("images"):
        raise PipelineFailed("the pipeline gave no pictures")
    return [
        frames.Picture(image.width, image.height, image.convert("RGB").tobytes())
        for image in fields["images"]
    ]


def _failed(request_id: str, error: Exception) -> frames.Failed:
    known = error if isinstance(error, CarpoolError) else PipelineFailed(repr(error))
    return frames.Failed(
        request_id, type(known).__name__, known.message, known.param, known.retry_after_s
    )


def _end_with(connection: socket.socket) -> None:
    """End the process once the front hangs up, even while a model is being loaded."""
    hang_ups = select.poll()
    hang_ups.register(connection, 0)  # these need not be asked for
    hang_ups.poll()
    os._exit(0)


def main() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        threading.Thread(target=_end_with, args=[connection], daemon=True).start()
        Worker(connection).serve()
    os._exit(0)  # at once: nobody is left who could want a running forward's answer


if __name__ == "__main__":
    main()
