"""Remember what tensors of the device were made of: their content is known without reading them.

To compare constants by content would mean to wait for the device. Most were copied from the host
(`pinned_copies.py`), and some pipelines put them together again at every step (FLUX.2 the positions
of a picture and of its references).

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

_joined = WeakTensorKeyDictionary()
_copied = WeakTensorKeyDictionary()


def note_copy(value: Tensor, source: Tensor) -> None:
    """Remember what a tensor of the device was copied from.

    Args:
        source: on the host, with the same values, type and shape; nobody changes it.
    """
    if source.nbytes <= MOST_BYTES and not value.is_inference():
        _copied[value] = source, value._version


def source_of(value: Tensor) -> Tensor | None:
    """The source that a tensor was copied from; None: not known, or it has changed since."""
    entry = _copied.get(value)  # type: ignore[no-untyped-call]
    return entry[0] if entry is not None and entry[1] == value._version else None


def parts_of(value: Tensor) -> Parts | None:
    """The parts that a tensor was put together of; None: not known, or one has changed since."""
    entry = _joined.get(value)  # type: ignore[no-untyped-call]
    if entry is None:
        return None
    axis, parts, versions = entry
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
    if isinstance(axis, int) and not any(tensor.is_inference() for tensor in (result, *parts)):
        _joined[result] = axis % result.ndim, parts, _versions(result, parts)
    return result


def watch() -> None:
    """Remember what is concatenated from now on."""
    torch.cat = _cat


def ignore() -> None:
    """Leave `torch.cat` as torch has it."""
    torch.cat = _plain
