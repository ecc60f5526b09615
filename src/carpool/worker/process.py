"""The worker process: an engine behind a socket.

It gets one end of a socket pair: it is forked (`forkserver.py`), or started as
`python -m carpool.worker.process FD`. The main thread reads messages, the engine has its own
thread, and a third one writes, so that the engine's loop never waits for the front. The process
ends when the front closes the socket. If it is stopped or too stuck to notice that, the kernel
kills it when the front's process ends.
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
from collections.abc import Callable

from carpool.errors import CarpoolError, LoadFailed, reason
from carpool.telemetry import logs, standard_streams, tracing
from carpool.worker import encoding, protocol, startup
from carpool.worker.message_handler import MessageHandler
from carpool.worker.request_listener import failed
from carpool.worker.update_sender import AnswerBatch, ProgressUpdate, UpdateSender
from carpool.worker.watchdog import INTERVAL_S

log = logging.getLogger("carpool")

ACTIVITIES = 4  # per heartbeat, while watched


class WorkerProcess:
    """The worker's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._stream = connection, connection.makefile("rb")
        self._tracing = tracing.Tracing()
        self._at_end: Callable[[], None] = lambda: None
        self._is_ending = threading.Lock()
        self._handler: MessageHandler | None = None  # set once the model is loaded
        self._outbox = queue.SimpleQueue[protocol.ToFront | ProgressUpdate | None]()
        self._updates = UpdateSender(self._outbox.put)
        threading.Thread(target=self._write, name="carpool-write", daemon=True).start()

    def serve(self) -> None:
        """Load the model of the first message, then handle messages until the socket closes."""
        first = self._next()
        if not isinstance(first, protocol.LoadModel):
            return
        try:
            handler = self._load(first)
        except CarpoolError as error:
            self._refuse(error)
            return
        except Exception as error:  # a retry would fail in the same way
            log.debug("the model cannot be loaded", exc_info=error)
            why = f"{type(error).__name__}: {' '.join(reason(error).split())}"
            self._refuse(LoadFailed(f"cannot load {first.factory or first.model}: {why}"))
            return
        self._at_end = handler.engine.log_last_batches
        handler.start(self._hang_up)
        self._handler = handler
        while (message := self._next()) is not None:
            handler.handle(message)
        handler.close()

    def _load(self, message: protocol.LoadModel) -> MessageHandler:
        logs.set_up(message.log_level, message.log_format, prompts=message.log_prompts)
        if message.otel:
            self._tracing = tracing.start("worker")
        return MessageHandler(message, self.send, self._updates, self._tracing)

    def _refuse(self, error: CarpoolError) -> None:
        """Report a failed load, and wait until the front closes the socket."""
        if isinstance(error, LoadFailed) and error.was_killed:
            log.critical("%s", error)
            self.end()  # like a killed process: it will be retried
        wants_memory = isinstance(error, LoadFailed) and error.wants_memory
        self.send(protocol.LoadFailure(str(error), wants_memory))
        self._next()

    def _hang_up(self) -> None:
        """Close the socket after the engine's end, for a new worker."""
        with contextlib.suppress(OSError):  # the front may have closed it
            self._connection.shutdown(socket.SHUT_RDWR)

    def send_reports(self) -> None:
        """Send the engine's progress every second, and activity more often. Never returns."""
        while True:
            handler = self._handler  # None: still loading
            self.send(protocol.Heartbeat(0.0, 0.0) if handler is None else handler.heartbeat())
            for _ in range(ACTIVITIES):
                if handler is not None and (activity := handler.activity()) is not None:
                    self.send(activity)
                time.sleep(INTERVAL_S / ACTIVITIES)

    def end(self) -> None:
        """End the process at once, even during a forward."""
        self._is_ending.acquire()  # never released: the first caller ends the process
        self._tracing.stop()
        self._at_end()
        os._exit(0)

    def send(self, message: protocol.ToFront) -> None:
        """Queue a message; messages arrive in order. Never blocks."""
        self._outbox.put(message)

    def _next(self) -> protocol.ToWorker | None:
        try:
            body = encoding.read(self._stream)
        except ConnectionError:
            return None
        return None if body is None else encoding.decode_to_worker(body)

    def _write(self) -> None:
        while True:
            try:
                messages = [self._outbox.get(timeout=self._updates.wait_s())]
            except queue.Empty:
                messages = [*self._updates.due()]
            try:
                for message in messages:
                    if message is not None:
                        self._connection.sendall(_encoded(message))
            except OSError:
                return  # the front is gone; the reading thread will notice


def _encoded(message: protocol.ToFront | AnswerBatch) -> bytes:
    """Encode a message; an output that cannot be encoded becomes a failure of its request."""
    try:
        return encoding.encode(message.packed() if isinstance(message, AnswerBatch) else message)
    except Exception as error:
        log.exception("a message to the front cannot be encoded")
        if isinstance(message, protocol.Done):
            return encoding.encode(failed(message.request_id, error))
        return b""


def _end_with_front(connection: socket.socket, worker: WorkerProcess) -> None:
    """End the process when the front closes the socket, even during loading."""
    hangup = select.poll()
    hangup.register(connection, 0)  # POLLHUP is always reported
    hangup.poll()
    worker.end()


def run(connection: int) -> None:
    """Run a worker: serve the front at the other end of a socket. Never returns."""
    startup.die_with_parent()
    startup.name_process(startup.PROCESS_NAME)
    standard_streams.protect()
    worker = WorkerProcess(front := socket.socket(fileno=connection))
    threading.Thread(target=_end_with_front, args=[front, worker], daemon=True).start()
    threading.Thread(target=worker.send_reports, name="carpool-heartbeat", daemon=True).start()
    startup.import_engine()
    worker.serve()
    worker.end()


def main() -> None:
    startup.set_environment()
    run(int(sys.argv[1]))


if __name__ == "__main__":
    main()
