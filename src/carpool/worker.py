"""An engine in a process of its own, spoken to in frames over a socket.

The front starts it as `python -m carpool.worker FD` with one end of a socket pair. The main
thread reads frames, the engine has its own thread, and a third one writes, so that the loop never
waits for the front. The process ends when the front closes the socket, however that came about:
none is left behind.
"""

import os
import queue
import socket
import sys
import threading
import time
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
        from carpool.engine.loop import Engine

        began_s = time.monotonic()
        try:
            loaded = pipeline.load(first.model, first.settings)
        except CarpoolError as error:
            self.say(frames.CannotLoad(str(error)))
            self._next()  # the front hangs up once it has read this
            return
        engine = Engine(loaded, first.settings)
        meter = pipeline.Meter(loaded)
        thread = threading.Thread(target=engine.run, name="carpool-engine", daemon=True)
        thread.start()
        self.say(frames.Ready(loaded.card, pipeline.versions(), time.monotonic() - began_s))
        while (frame := self._next()) is not None:
            match frame:
                case frames.Submit(job):
                    follower = _Follower(self, job, frames.Usage(*meter.usage(job)))
                    try:
                        engine.submit(job, follower)
                    except CarpoolError as error:
                        self.say(_failed(job.request_id, error))
                case frames.Cancel(request_id):
                    engine.cancel(request_id)
                case frames.AskStatistics():
                    self.say(frames.Statistics(engine.statistics()))

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
        pictures = [
            frames.Picture(image.width, image.height, image.convert("RGB").tobytes())
            for image in outcome.fields.get("images", ())
        ]
        self._worker.say(
            frames.Done(
                self._job.request_id, self._job.seed, pictures, outcome.timings, self._usage
            )
        )


def _failed(request_id: str, error: Exception) -> frames.Failed:
    known = error if isinstance(error, CarpoolError) else PipelineFailed(repr(error))
    return frames.Failed(
        request_id, type(known).__name__, known.message, known.param, known.retry_after_s
    )


def main() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        Worker(connection).serve()
    os._exit(0)  # at once: nobody is left who could want a running forward's answer


if __name__ == "__main__":
    main()
