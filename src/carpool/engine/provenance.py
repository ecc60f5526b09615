"""Remember which tensors a pipeline has concatenated: then their content is known without reading.

Some pipelines put constants together again at every step (FLUX.2 the positions of a picture and of
its references). To compare them by content would mean to wait for the device each time.

`torch.cat` is replaced while a request's own code runs, and only then: compiled graphs are valid
for the function that they were made with, so a forward must see the plain one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from carpool.engine.fiber import current_context

MOST_BYTES = 4 * 2**20  # of a tensor that is remembered: its parts live as long as it does

Parts = tuple[int, tuple[Tensor, ...]]  # axis, and what was put together along it

_made = WeakTensorKeyDictionary()


def parts_of(value: Tensor) -> Parts | None:
    """What a tensor was put together of; None: not known, or one of them has changed since."""
    known = _made.get(value)  # type: ignore[no-untyped-call]
    if known is None:
        return None
    axis, parts, versions = known
    return (axis, parts) if versions == _versions(value, parts) else None


def _versions(value: Tensor, parts: tuple[Tensor, ...]) -> tuple[int, ...]:
    return (value._version, *(part._version for part in parts))


_plain = torch.cat


def _cat(*args: Any, **kwargs: Any) -> Any:
    result = _plain(*args, **kwargs)
    if current_context() is None or result.device.type == "cpu" or result.nbytes > MOST_BYTES:
        return result
    parts = tuple(args[0] if args else kwargs["tensors"])
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if isinstance(axis, int) and not any(one.is_inference() for one in (result, *parts)):
        _made[result] = axis % result.ndim, parts, _versions(result, parts)
    return result


def watch() -> None:
    """Remember what is concatenated from now on."""
    torch.cat = _cat


def ignore() -> None:
    """Leave `torch.cat` as torch has it."""
    torch.cat = _plain
