"""Run blocking code so that it can be paused from the outside.

A *fiber* is a greenlet with three verbs: `start`, `resume`, `fail`. The code inside stays
ordinary and synchronous; when it needs work done for it, it calls `park(call)`, which hands `call`
to the caller that resumed the fiber last and sleeps until an answer, or an exception, comes back.
A fiber may have a context, which is entered whenever its body runs and left when it pauses.

All fibers live on the thread that starts them. This is the only module that imports greenlet.
Nothing here knows about tensors, models or schedules.
"""

import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, Literal, Protocol

import greenlet


class FiberExit(BaseException):
    """Unwinds a fiber that is no longer needed; `except Exception` does not stop it."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The body ended and gave this value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The body ended with this exception."""

    error: BaseException


class FiberContext(Protocol):
    """State of the thread or the process that a fiber has for itself while its body runs."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


FiberKind = Literal["request", "forward"]
"""The work of a fiber: a request's pipeline, or a forward that pauses to load weights."""


class Fiber:
    """One run of `body`, pausable wherever it parks.

    Every verb runs the body until its next `park` and returns the parked call, or `Returned` or
    `Raised` once the body has ended.
    """

    def __init__(
        self,
        body: Callable[[], Any],
        context: FiberContext | None = None,
        *,
        kind: FiberKind = "request",
    ) -> None:
        # a greenlet without a reference to its fiber: no cycle, so a dropped fiber unwinds
        self._greenlet = _Body(functools.partial(_run, body))
        self._greenlet.context = self._context = context
        self._greenlet.kind = kind
        # a greenlet starts with an empty context; the body expects its creator's
        self._greenlet.gr_context = contextvars.copy_context()

    @property
    def is_alive(self) -> bool:
        """Started and not ended."""
        return bool(self._greenlet)

    def start(self) -> Any:
        return self._switch(self._greenlet.switch)

    def resume(self, answer: Any) -> Any:
        """Let `park` return `answer`."""
        return self._switch(self._greenlet.switch, answer)

    def fail(self, error: BaseException) -> Any:
        """Let `park` raise `error`. The body may catch it like any exception."""
        line = error.__traceback__  # kept: the line that raised it, without values of its callers
        clear_frames(line)
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        return self._switch(self._greenlet.throw, type(error), error, line)

    def close(self) -> None:
        """Unwind the body, running its `finally` blocks, whatever it catches or parks meanwhile.

        Raises:
            RuntimeError: it parked again a hundred times instead of ending.
        """
        for _ in range(100):
            if not self.is_alive:
                return
            self.fail(FiberExit())
        raise RuntimeError("a fiber refuses to end: it parks again after each request to exit")

    def _switch(self, switch: Callable[..., Any], *answer: Any) -> Any:
        if self._context is None:
            return switch(*answer)
        self._context.enter()
        try:
            return switch(*answer)
        finally:
            self._context.leave()


def _run(body: Callable[[], Any], padding: int = 40) -> Returned | Raised:
    """Run a body below calls from C: torch's errors read 64 native frames of the stack, and those
    beyond the fiber's own have changed: with half of the calls, the process may end there."""
    if padding:
        return next(map(_run, [body], [padding - 1]))
    try:
        return Returned(body())
    except BaseException as error:  # passed on, not swallowed: the engine decides
        return Raised(error)


class _Body(greenlet.greenlet):
    """Marks our greenlets: `in_fiber` must ignore those of other libraries."""

    context: Any = None
    kind: FiberKind = "request"


def in_fiber(kind: FiberKind = "request") -> bool:
    """Whether the running code is the body of a fiber of this kind."""
    current = greenlet.getcurrent()
    return isinstance(current, _Body) and current.kind == kind


def current_context() -> Any:
    """The context of the request's fiber whose body is running; None outside of such fibers."""
    current = greenlet.getcurrent()
    return current.context if isinstance(current, _Body) and current.kind == "request" else None


def park(call: Any) -> Any:
    """Pause this fiber and hand `call` to the caller that resumed it; return its answer.

    Raises:
        any exception the engine throws into the fiber: the call's failure, or `FiberExit`.
    """
    hub = greenlet.getcurrent().parent
    assert hub is not None, "park() outside of a fiber"
    return hub.switch(call)
