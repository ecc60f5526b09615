"""Record the sources of device tensors, so that their content is known without reading them.

Comparing constants by content would wait for the device. Most were copied from the host
(`pinned_copies.py`), and some pipelines concatenate them again at every step (FLUX.2: the positions
of the image and of its references).

`cat` replaces `torch.cat` only while a request's own code runs: compiled graphs are valid for the
function they were compiled with, so a forward must see the original one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from carpool.engine.fiber import current_context

MOST_BYTES = 4 * 2**20  # largest recorded tensor: its parts stay alive with it

Parts = tuple[int, tuple[Tensor, ...]]  # axis, and the concatenated parts

_joined = WeakTensorKeyDictionary()
_copied = WeakTensorKeyDictionary()


def note_copy(value: Tensor, source: Tensor) -> None:
    """Record the source of a device tensor's copy.

    Args:
        source: host tensor of equal values, dtype and shape. It is cloned: torch ends the process
            when pinned memory is released after its device has failed.
    """
    if source.nbytes <= MOST_BYTES and not value.is_inference():
        _copied[value] = source.clone(), value._version


def source_of(value: Tensor) -> Tensor | None:
    """The host tensor that a tensor was copied from; None: unknown, or changed since."""
    entry = _copied.get(value)  # type: ignore[no-untyped-call]
    return entry[0] if entry is not None and entry[1] == value._version else None


def parts_of(value: Tensor) -> Parts | None:
    """The parts that a tensor was concatenated from; None: unknown, or one changed since."""
    entry = _joined.get(value)  # type: ignore[no-untyped-call]
    if entry is None:
        return None
    axis, parts, versions = entry
    return (axis, parts) if versions == _versions(value, parts) else None


def _versions(value: Tensor, parts: tuple[Tensor, ...]) -> tuple[int, ...]:
    return (value._version, *(part._version for part in parts))


_plain = torch.cat


def cat(*args: Any, **kwargs: Any) -> Any:
    """Concatenate like `torch.cat`, and record the parts."""
    result = _plain(*args, **kwargs)
    if current_context() is None or result.device.type == "cpu" or result.nbytes > MOST_BYTES:
        return result
    parts = tuple(args[0] if args else kwargs["tensors"])
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if isinstance(axis, int) and not any(tensor.is_inference() for tensor in (result, *parts)):
        _joined[result] = axis % result.ndim, parts, _versions(result, parts)
    return result
