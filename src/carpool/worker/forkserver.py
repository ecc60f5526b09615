"""The fork server: a process that has imported torch and diffusers, and forks workers.

A forked worker starts in milliseconds instead of seconds, and shares the memory of the imported
modules with all others. The front (`start.py`) runs it as `python -m carpool.worker.forkserver FD`
and sends it, over the socket FD, one socket for each worker: see `protocol.ForkRequest`.
`python -m carpool.worker.forkserver PATH NAME...` listens on a Unix socket instead and serves any
number of fronts, whose environments may differ in these variables.

Forking is safe while there is one thread and no open device. If an import has started threads or
opened a device, the server does not fork: this process becomes the first worker itself, and the
front starts other workers as new interpreters.
"""

import contextlib
import os
import select
import selectors
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from carpool.telemetry import standard_streams
from carpool.worker import encoding, process, startup
from carpool.worker.protocol import FORK_REFUSED, ForkRequest

_READ_LATE = (b"CARPOOL_", b"OTEL_")  # prefixes of variables that no import reads
_DESCRIPTORS = 3  # passed with a request
_REQUEST_S = 10.0  # limit for a front's request to arrive
_HARMLESS = {"full", "null", "random", "tty", "urandom", "zero"}  # in /dev, safe to fork with


class ForkServer:
    """Forks workers until its source closes.

    Args:
        source: delivers a socket for each worker; or accepts connections, if it listens.
        environ: the variables at this process's start.
        may_differ: names of variables with possibly other values in a worker.
    """

    def __init__(
        self,
        source: socket.socket,
        environ: Mapping[bytes, bytes],
        may_differ: Collection[bytes] = (),
    ) -> None:
        self._source, self._may_differ = source, frozenset(may_differ)
        self._environ = self._read_early(environ)
        self._fronts: dict[int, socket.socket] = {}  # keyed by the worker's process id
        self._wakers = socket.socketpair()  # wakes the loop when a worker ends
        self._is_open = True
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until the source closes; then kill the workers."""
        for end in self._wakers:
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakers[1].fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._wakers[0], selectors.EVENT_READ, self._reap)
        self._selector.register(self._source, selectors.EVENT_READ, self._take)
        while self._is_open:
            for key, _ in self._selector.select():
                key.data()
        for pid in self._fronts:
            self._kill(pid)

    def _take(self) -> None:
        """Start a worker, or refuse."""
        if (front := _next_front(self._source)) is None:
            self._is_open = False
            return
        front.settimeout(_REQUEST_S)
        passed: list[int] = []
        try:
            _, passed, _, _ = socket.recv_fds(front, 1, _DESCRIPTORS)
            with front.makefile("rb") as stream:
                request = encoding.decode_fork_request(encoding.read(stream) or b"")
            if len(passed) < _DESCRIPTORS or _is_closed(front):
                # closed: it waited too long, and another worker has the same socket by now
                raise ConnectionError("descriptors are missing, or the front has given up")
            if self._read_early(request.environ) != self._environ:
                front.sendall(encoding.NUMBER.pack(FORK_REFUSED))
                front.close()
            elif is_safe():
                self._fork(front, passed, request)
            else:
                front.sendall(encoding.NUMBER.pack(os.getpid()))
                self._source.close()  # refuses further workers
                _become_worker(passed, request)
        except (OSError, encoding.Undecodable):  # the front has gone, or it was another peer
            front.close()
        finally:
            for handle in passed:
                os.close(handle)

    def _fork(self, front: socket.socket, passed: list[int], request: ForkRequest) -> None:
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for channel in (front, self._source, *self._wakers, *self._fronts.values()):
                channel.close()  # so that others notice when these end
            self._selector.close()
            os.setsid()  # the front handles Ctrl-C
            _become_worker(passed, request)
        self._fronts[pid] = front
        self._selector.register(front, selectors.EVENT_READ, partial(self._kill, pid))
        with contextlib.suppress(OSError):  # it has gone, which is read next
            front.sendall(encoding.NUMBER.pack(pid))

    def _kill(self, pid: int) -> None:
        """Kill a worker whose front has gone or no longer needs it."""
        if pid in self._fronts:
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Report ended workers to their fronts."""
        with contextlib.suppress(BlockingIOError):
            self._wakers[0].recv(4096)
        while self._fronts:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            front = self._fronts.pop(pid)
            self._selector.unregister(front)
            with front, contextlib.suppress(OSError):  # the front may have gone
                front.sendall(encoding.NUMBER.pack(os.waitstatus_to_exitcode(status)))

    def _read_early(self, environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """The variables that libraries may have read at import."""
        return {
            name: text
            for name, text in environ.items()
            if not name.startswith(_READ_LATE) and name not in self._may_differ
        }


def _next_front(source: socket.socket) -> socket.socket | None:
    """The next front's socket; None at the end of the source."""
    if source.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return source.accept()[0]
    _, handles, _, _ = socket.recv_fds(source, 1, 1)
    return socket.socket(fileno=handles[0]) if handles else None


def _become_worker(passed: list[int], request: ForkRequest) -> NoReturn:
    """Become the worker requested by a front. Never returns."""
    try:
        connection, stdout, stderr = passed
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        if sys.path[0] == os.getcwd():  # set by `python -m`
            sys.path[0] = os.fsdecode(request.folder)
        os.chdir(request.folder)
        os.umask(request.umask)
        os.environb.clear()
        os.environb.update(request.environ)
        startup.set_environment()
        process.run(connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def is_safe() -> bool:
    """Whether this process may be forked: it has one thread and no open device.

    Driver state does not survive a fork: for example, CUDA is unusable in a child of a process that
    has used it. Each driver keeps its device files open.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        return False
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_device = stat.S_ISCHR(entry.stat().st_mode)
            target = entry.readlink()
        except OSError:  # the descriptor of the listed folder, already closed
            continue
        is_terminal = target.parent.name == "pts"
        if is_device and not is_terminal and target.name not in _HARMLESS:
            return False
    return True


def main() -> None:
    startup.die_with_parent()
    startup.name_process("carpool-fork")
    standard_streams.protect()
    environ = dict(os.environb)
    startup.set_environment()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else it starts threads at import
    where, *may_differ = sys.argv[1:]
    with contextlib.ExitStack() as sockets:
        if where.isdecimal():
            source = sockets.enter_context(socket.socket(fileno=int(where)))
            if _is_closed(source):  # the front ended before `die_with_parent`
                return
        startup.import_engine()
        if not where.isdecimal():
            source = sockets.enter_context(_listening(where))
        ForkServer(source, environ, [os.fsencode(name) for name in may_differ]).run()


def _is_closed(source: socket.socket) -> bool:
    hangup = select.poll()
    hangup.register(source, 0)  # POLLHUP is always reported
    return bool(hangup.poll(0))


def _listening(path: str) -> socket.socket:
    """A socket that listens at a path, for processes of this user only."""
    source = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    source.bind(path)
    os.umask(before)
    source.listen(64)
    return source


if __name__ == "__main__":
    main()
