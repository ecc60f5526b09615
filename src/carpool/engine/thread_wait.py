"""Where a thread waits in user code, read from its stack by another thread.

A lock, a semaphore, a condition, a queue or a future keeps a thread asleep inside a few modules of
Python, or inside one instruction. Both show in its stack; the awaited object does not.
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

THREAD_PREFIX = "carpool-"  # prefix of the names of Carpool's own threads
_LOCKING = {
    *("concurrent.futures._base", "concurrent.futures.thread", "multiprocessing.synchronize"),
    *("queue", "threading"),
}
_LOCKING_PACKAGES = {"fasteners", "filelock", "portalocker"}  # they poll a file
_INNERMOST = sys.stdlib_module_names | _LOCKING_PACKAGES
_BETWEEN = {"contextlib", "functools"}  # may call the above for other code
_CALLS = {"acquire", "flock", "get", "join", "lockf", "put", "result", "wait", "__enter__"}
_ENTERS = {"BEFORE_WITH", "LOAD_SPECIAL"}  # opcodes of a `with`: C code may block a thread there


@dataclass(frozen=True, slots=True)
class ThreadWait:
    """A snapshot of a thread that stands in user code."""

    frame: FrameType  # the user code's frame
    instruction: int
    is_lock: bool  # it waits for a lock or a similar object
    cpu_s: float  # CPU seconds of the thread so far

    @property
    def place(self) -> str:
        """The line in readable form."""
        code, line = self.frame.f_code, self.frame.f_lineno
        text = linecache.getline(code.co_filename, line).strip().rstrip(":")
        return f"{Path(code.co_filename).name}:{line}, in {code.co_name}: {text}"

    def is_same(self, other: "ThreadWait") -> bool:
        """Whether the thread is at the same instruction."""
        return self.frame is other.frame and self.instruction == other.instruction


def wait_of(thread: int) -> ThreadWait | None:
    """Where a thread stands in user code; None: it runs code of a library, or has ended."""
    stack = _stack(thread)
    place = len(_of_python(stack))
    if place == len(stack) or _name(stack[place]).partition(".")[0] in SHIPPED:
        return None
    frame = stack[place]
    return ThreadWait(frame, frame.f_lasti, _is_locking(stack), _cpu_s(thread))


def are_at_work(idents: Collection[int]) -> bool:
    """Whether any thread of the process, apart from Carpool's and `idents`, is at work.

    Args:
        idents: ids of threads to ignore.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, name in names.items():
        if ident is None or ident in idents or name.startswith(THREAD_PREFIX):
            continue
        if (stack := _stack(ident)) and not _is_locking(stack):
            return True
    return False


def _stack(thread: int) -> list[FrameType]:
    """The frames of a thread, innermost first."""
    frame, stack = sys._current_frames().get(thread), list[FrameType]()
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def _of_python(stack: list[FrameType]) -> list[str]:
    """The innermost modules of a stack that belong to Python itself or to packages of locks."""
    names = map(_name, stack)
    return list(takewhile(lambda name: name.partition(".")[0] in _INNERMOST, names))


def _is_locking(stack: list[FrameType]) -> bool:
    """Whether a stack ends in a wait for a lock or a similar object."""
    names = _of_python(stack)
    if not names or set(names) <= _BETWEEN:
        return bool(stack) and _enters_lock(stack[0])
    others = set(names) - _LOCKING - _BETWEEN
    return {name.partition(".")[0] for name in others} <= _LOCKING_PACKAGES


def _enters_lock(frame: FrameType) -> bool:
    """Whether a frame's instruction may block in C on a lock."""
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
    """The instructions of a frame's code, up to the current one."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            return
        yield instruction


def _name(frame: FrameType) -> str:
    """The name of the module of a frame's code."""
    return str(frame.f_globals.get("__name__") or "?")


def _cpu_s(thread: int) -> float:
    """CPU seconds used by a thread; 0 if the system does not report them."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    try:
        return 0.0 if clock is None else time.clock_gettime(clock(thread))
    except OSError:  # the thread has ended
        return 0.0
