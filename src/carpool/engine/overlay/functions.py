"""Torch functions that write on shared weights, or give views of them, in code of users.

The methods of parameters report to their fiber (`writes`); functions (`torch.transpose(weight, 0,
1)`), `out=` and the methods of buffers, which are plain tensors, do not. A function mode sees them
all, and makes each call of a function slower: so only requests have one that run code which the
libraries do not ship: a pipeline, a scheduler or a callback. Forwards never run in it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from carpool.engine.overlay.overlay import Overlay
from carpool.engine.overlay.writes import IN_PLACE, data

_len: Any = torch._C._len_torch_function_stack
_pop: Any = torch.overrides._pop_mode
_push: Any = torch.overrides._push_mode


class FunctionModes:
    """The thread's stack of function modes, of which each fiber has one for itself.

    `with torch.device(...)` is such a mode, too, and a fiber may pause in it.
    """

    def __init__(self, *modes: TorchFunctionMode) -> None:
        self._mine = self._outside = [*_now(), *modes]
        self._usual = len(self._mine)

    def enter(self) -> None:
        if self._mine or _len():  # seldom
            self._outside = _taken()
            _put(self._mine)
        else:
            self._outside = []

    def leave(self) -> None:
        if self._outside or _len():
            self._mine = _taken()
            _put(self._outside)
        else:
            self._mine = []

    @property
    def are_changed(self) -> bool:
        """Whether the running fiber has others than it began with."""
        return bool(_len() != self._usual)

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        """The fiber's modes, entered before, without its watch."""
        mine = _taken()
        _put(one for one in mine if not isinstance(one, WeightsWatch))
        try:
            yield
        finally:
            _taken()
            _put(mine)


def _taken() -> list[Any]:
    return [_pop() for _ in range(_len())][::-1]


def _now() -> list[Any]:
    _put(modes := _taken())
    return modes


def _put(modes: Iterable[Any]) -> None:
    for mode in modes:
        _push(mode)


class WeightsWatch(TorchFunctionMode):
    """Gives a request its own copy of a shared weight or buffer before a function writes on it."""

    def __init__(self, overlay: Overlay) -> None:
        super().__init__()
        self._overlay = overlay

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        held = [one for one in _tensors((*args, *given.values())) if self._overlay.holds(one)]
        if not held:
            return func(*args, **given)
        if _writes(func, given):
            for one in held:
                self._overlay.own(one)
            return func(*args, **given)
        answer = func(*args, **given)
        seen = {_place(one) for one in _tensors((answer,))} - {0}
        if not (viewed := [one for one in held if _place(data(one)) in seen]):
            return answer
        for one in viewed:
            self._overlay.own(one)
        return func(*args, **given)  # once more, which gives a view of the copy


def _writes(func: Any, given: Mapping[str, Any]) -> bool:
    name = str(getattr(func, "__name__", ""))
    is_method = name.startswith("__")
    return (
        name in IN_PLACE
        or name == "__set__"
        or (name.endswith("_") and not is_method)
        or "out" in given
        or bool(given.get("inplace"))
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _place(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a kind without storage
        return 0
