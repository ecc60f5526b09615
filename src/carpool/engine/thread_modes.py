"""Modes of the thread: each fiber has its own.

Of torch: gradients, inference mode, autocast with its depth and its cache, and the stacks of
dispatch modes and of function modes (`with torch.device(...)` is one): a fiber may pause inside a
`with` of any of them. Of Python: the running event loop, which each fiber may have for itself
(`asyncio.run` around a call), with the hooks of its generators.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch

_length: Any = torch._C._len_torch_dispatch_stack
is_autocast_on: Any = torch._C._is_any_autocast_enabled
_Events = tuple[asyncio.AbstractEventLoop | None, Any, Any]
_push: Any = dispatch._push_mode
_pop: Any = dispatch._pop_mode
_functions: Any = torch._C._len_torch_function_stack
_push_function: Any = torch.overrides._push_mode
_pop_function: Any = torch.overrides._pop_mode


@dataclass(frozen=True, slots=True)
class Modes:
    """Gradients and autocast; the defaults are those at a pipeline's start."""

    has_grad: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()  # per device with autocast on
    caches: bool = True  # whether autocast caches its casts of weights
    depth: int = 0  # nested autocasts: leaving the last one clears the cache

    @classmethod
    def now(cls) -> "Modes":
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        has_grad, is_on = torch.is_grad_enabled(), is_autocast_on()
        caches = torch.is_autocast_cache_enabled()
        if not (has_grad or is_on or depth) and caches:
            return PLAIN  # common case
        on = [device for device in _DEVICES if is_on and torch.is_autocast_enabled(device)]
        types = tuple([(device, torch.get_autocast_dtype(device)) for device in on])
        return cls(has_grad, types, caches, depth)

    def set(self) -> None:
        torch.set_grad_enabled(self.has_grad)
        dtypes = dict(self.autocast)
        for device in _DEVICES:
            torch.set_autocast_enabled(device, device in dtypes)
            if device in dtypes:
                torch.set_autocast_dtype(device, dtypes[device])
        torch.set_autocast_cache_enabled(self.caches)
        torch.clear_autocast_cache()  # a weight may have changed when the fiber continues
        while (depth := torch.autocast_increment_nesting()) <= self.depth:
            pass
        while depth > self.depth:
            depth = torch.autocast_decrement_nesting()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set the modes while the context lasts."""
        before = Modes.now()
        self.set()
        try:
            yield
        finally:
            before.set()


class ThreadModes:
    """The modes of one fiber; see `fiber.FiberContext`."""

    def __init__(self) -> None:
        self._modes = self._outside = PLAIN
        self._inference: torch.inference_mode | None = None  # switches it off for other fibers
        self._dispatch: list[Any] = []
        self._outside_dispatch: list[Any] = []  # dispatch modes of the code that resumed the fiber
        self._events = self._outside_events = _NO_EVENTS
        self._of_functions = _taken()  # function modes, outermost first
        self._outside_functions: list[Any] = []
        self._usual = len(self._of_functions)  # as many as at its start
        _put(self._of_functions)

    def enter(self) -> None:
        self._outside_events = asyncio._get_running_loop(), *sys.get_asyncgen_hooks()
        if self._outside_events != self._events:
            _set_events(self._events)
        self._outside = Modes.now()
        is_changed = self._modes is not self._outside
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
            self._inference, is_changed = None, True
        if is_changed:
            self._modes.set()
        if self._dispatch or _length():
            self._outside_dispatch = _exchanged(self._dispatch)
        if self._of_functions or _functions():  # rare
            self._outside_functions = _taken()
            _put(self._of_functions)
        else:
            self._outside_functions = []

    def leave(self) -> None:
        if self._outside_functions or _functions():
            self._of_functions = _taken()
            _put(self._outside_functions)
        else:
            self._of_functions = []
        self._events = asyncio._get_running_loop(), *sys.get_asyncgen_hooks()
        if self._events != self._outside_events:
            _set_events(self._outside_events)
        if self._outside_dispatch or _length():
            self._dispatch = _exchanged(self._outside_dispatch)
            self._outside_dispatch = []
        else:
            self._dispatch = []
        self._modes = Modes.now()
        is_changed = self._outside is not self._modes
        if torch.is_inference_mode_enabled():  # the fiber paused inside such a `with`
            self._inference = torch.inference_mode(mode=False)
            self._inference.__enter__()
            is_changed = True
        if is_changed:
            self._outside.set()

    @property
    def can_share(self) -> bool:
        """Whether calls of other requests may run in the modes of the running fiber."""
        return not (torch.is_grad_enabled() or _length() or _functions() != self._usual)


def _exchanged(modes: list[Any]) -> list[Any]:
    """Replace the stack of dispatch modes; returns the former one, outermost first."""
    before = [_pop() for _ in range(_length())][::-1]
    for mode in modes:
        _push(mode)
    return before


def _taken() -> list[Any]:
    """Take all function modes off their stack; outermost first."""
    return [_pop_function() for _ in range(_functions())][::-1]


def _put(modes: list[Any]) -> None:
    for mode in modes:
        _push_function(mode)


def _set_events(events: _Events) -> None:
    """Replace the thread's event loop and hooks of generators."""
    asyncio._set_running_loop(events[0])
    sys.set_asyncgen_hooks(*events[1:])


PLAIN = Modes()
_NO_EVENTS: _Events = (None, None, None)
_NAMES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "maia")
_DEVICES = tuple([name for name in _NAMES if torch.amp.is_autocast_available(name)])
