"""The thread's stack of function modes: each fiber has its own.

`with torch.device(...)` is such a mode, and a fiber may pause inside.
"""

from collections.abc import Iterable
from typing import Any

import torch

_len: Any = torch._C._len_torch_function_stack
_pop: Any = torch.overrides._pop_mode
_push: Any = torch.overrides._push_mode


class FunctionModes:
    """The modes of one fiber; see `fiber.FiberContext`."""

    def __init__(self) -> None:
        self._modes = self._outside = _present()
        self._usual = len(self._modes)

    def enter(self) -> None:
        if self._modes or _len():  # rare
            self._outside = _taken()
            _put(self._modes)
        else:
            self._outside = []

    def leave(self) -> None:
        if self._outside or _len():
            self._modes = _taken()
            _put(self._outside)
        else:
            self._modes = []

    @property
    def are_changed(self) -> bool:
        """Whether the running fiber's modes differ from those at its start."""
        return bool(_len() != self._usual)


def _taken() -> list[Any]:
    return [_pop() for _ in range(_len())][::-1]


def _present() -> list[Any]:
    _put(modes := _taken())
    return modes


def _put(modes: Iterable[Any]) -> None:
    for mode in modes:
        _push(mode)
