"""The wait of a thread in code of users, read from its stack by another thread.

A lock, a semaphore, a condition, a queue or a future keeps a thread asleep inside of a few modules
of Python, or inside of one instruction. Both show in its stack; what it waits for does not.
"""

import dis
import linecache
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType

from carpool.engine.reach.names import SHIPPED

THREAD_PREFIX = "carpool-"  # the names of Carpool's own threads begin so
_LOCKING = {
    *("concurrent.futures._base", "concurrent.futures.thread", "multiprocessing.synchronize"),
    *("queue", "threading"),
}
_LOCKING_PACKAGES = {"fasteners", "filelock", "portalocker"}  # which ask for a file again and again
_INNERMOST = sys.stdlib_module_names | _LOCKING_PACKAGES
_BETWEEN = {"contextlib", "functools"}  # may call the above for others
_CALLS = {"acquire", "flock", "get", "join", "lockf", "put", "result", "wait", "__enter__"}
_ENTERS = {"BEFORE_WITH", "LOAD_SPECIAL"}  # of a `with`: code in C keeps a thread there


@dataclass(frozen=True, slots=True)
class ThreadWait:
    """One look at a thread that stands in code of users."""

    frame: FrameType  # of that code
    instruction: int
    is_lock: bool  # it waits for a lock or the like
    cpu_s: float  # that the thread has used in its life

    @property
    def place(self) -> str:
        """The line, as people find it."""
        code, line = self.frame.f_code, self.frame.f_lineno
        text = linecache.getline(code.co_filename, line).strip().rstrip(":")
        return f"{Path(code.co_filename).name}:{line}, in {code.co_name}: {text}"

    def is_same(self, other: "ThreadWait") -> bool:
        """Whether the thread stands where it stood."""
        return self.frame is other.frame and self.instruction == other.instruction


def wait_of(thread: int) -> ThreadWait | None:
    """How a thread stands in code of users; None: it runs code of a library, or has ended."""
    stack = _stack(thread)
    place = len(_of_python(stack))
    if place == len(stack) or _name(stack[place]).partition(".")[0] in SHIPPED:
        return None
    frame = stack[place]
    return ThreadWait(frame, frame.f_lasti, _is_locking(stack), _cpu_s(thread))


def are_at_work(idents: Collection[int]) -> bool:
    """Whether a thread of the process, beside ours and others, does something but wait.

    Args:
        idents: of threads that do not count.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, name in names.items():
        if ident is None or ident in idents or name.startswith(THREAD_PREFIX):
            continue
        if (stack := _stack(ident)) and not _is_locking(stack):
            return True
    return False


def _stack(thread: int) -> list[FrameType]:
    """The frames of a thread, the innermost first."""
    frame, stack = sys._current_frames().get(thread), list[FrameType]()
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def _of_python(stack: list[FrameType]) -> list[str]:
    """The modules of Python itself, and packages of locks, that a stack ends in."""
    names = map(_name, stack)
    return list(takewhile(lambda name: name.partition(".")[0] in _INNERMOST, names))


def _is_locking(stack: list[FrameType]) -> bool:
    """Whether a stack ends in a wait for a lock or the like."""
    names = _of_python(stack)
    if not names or set(names) <= _BETWEEN:
        return bool(stack) and _enters_lock(stack[0])
    return all(
        name in _LOCKING | _BETWEEN or name.partition(".")[0] in _LOCKING_PACKAGES for name in names
    )


def _enters_lock(frame: FrameType) -> bool:
    """Whether the instruction of a frame may be one that waits in C for a lock."""
    before = list(_until(frame))
    if not before or before[-1].opname in _ENTERS:
        return bool(before)
    call = before.pop().positions
    if call is None:
        return False
    start = call.lineno, call.col_offset
    loaded = [
        instruction for instruction in before
        if instruction.opname.startswith("LOAD_") and instruction.positions is not None
        and (instruction.positions.lineno, instruction.positions.col_offset) == start
    ]  # fmt: skip
    return bool(loaded) and str(loaded[-1].argval).rpartition(".")[2] in _CALLS


def _until(frame: FrameType) -> Iterator[dis.Instruction]:
    """The instructions of a frame's code, as far as it has come."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            return
        yield instruction


def _name(frame: FrameType) -> str:
    """The name of the module that a frame's code is of."""
    return str(frame.f_globals.get("__name__") or "?")


def _cpu_s(thread: int) -> float:
    """Seconds of a processor that a thread has used; 0 where the system does not tell."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    try:
        return 0.0 if clock is None else time.clock_gettime(clock(thread))
    except OSError:  # it has ended
        return 0.0
