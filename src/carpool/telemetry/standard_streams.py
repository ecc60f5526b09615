"""Standard output and error of a server: failing and unread writes are dropped.

A log line must not fail a request, and a full pipe without a reader must not stop a process. This
holds for every writer: logging, warnings, tracebacks, prints of a user's own pipeline.
"""

import contextlib
import io
import os
import select
import socket
import stat
import sys
from typing import Any

PATIENCE_S = 0.1  # with a full pipe, once; half loses lines of slow readers, twice stalls longer


def protect() -> None:
    """Replace `sys.stdout` and `sys.stderr`, unless a test or a host has replaced them.

    A closed descriptor below 3 becomes `/dev/null`: otherwise the next opened file would get it,
    and with it the output of libraries.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        present = getattr(sys, name)
        if present is None or present is getattr(sys, f"__{name}__"):
            with contextlib.suppress(OSError):
                if present is not None:
                    present.flush()
            stream = _stream(descriptor, getattr(present, "encoding", None) or "utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _stream(descriptor: int, encoding: str) -> io.TextIOWrapper:
    buffered = io.BufferedWriter(DroppingFile(descriptor))
    return io.TextIOWrapper(buffered, encoding, "backslashreplace", line_buffering=True)


class DroppingFile(io.RawIOBase):
    """Writes to a descriptor without ever failing or waiting for long."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._is_stalled = descriptor, False
        self._socket: socket.socket | None = None
        kind = os.fstat(descriptor).st_mode
        self._own = descriptor
        with contextlib.suppress(OSError):  # no /proc: writes may wait
            if stat.S_ISFIFO(kind):  # reopened: the descriptor's flags are shared
                self._own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
            elif stat.S_ISSOCK(kind):
                self._socket = socket.socket(fileno=os.dup(descriptor))

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._own != self._descriptor:
                os.close(self._own)
            if self._socket is not None:
                self._socket.close()

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        at = 0
        while at < len(view):
            try:
                at += self._write(view[at:])
                self._is_stalled = False
            except BlockingIOError:
                if self._is_stalled or not self._wait():
                    self._is_stalled = True
                    break
            except OSError:  # a full disk, or no reader
                break
        return len(view)

    def _write(self, view: memoryview) -> int:
        if self._socket is not None:
            return self._socket.send(view, socket.MSG_DONTWAIT)
        return os.write(self._own, view)

    def _wait(self) -> bool:
        """Wait until more can be written; returns whether it can."""
        room = select.poll()
        room.register(self._own, select.POLLOUT)
        return bool(room.poll(1000 * PATIENCE_S))
