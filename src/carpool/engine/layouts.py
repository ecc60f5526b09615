"""The memory layout that one call's part of a fused batch would have if the call were alone.

Reshaping one row may need no copy where reshaping several does, and gives axes of size one other
strides. Matrix products choose kernels by strides; convolutions and group norms detect
channels-last layouts by them. So the exact mode (`numerics`) records, at each reshape of a
non-contiguous tensor, the strides that every call's part would have alone, and uses them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.engine.operations import tensors

Strides = tuple[int, ...]
Layouts = tuple[Strides | None, ...]  # per call; None: the strides of its part of the batch

RESHAPES = frozenset(["reshape", "view", "unflatten", "flatten"])
PERMUTES = frozenset(["permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"])
ALIGNMENT_BYTES = 64  # torch's allocations: kernels may differ by alignment


def follow(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Tensor,
    rows: Sequence[int],
    layouts: Layouts | None,
) -> Layouts | None:
    """The calls' layouts after a reshape or permutation, found by a dry run per call.

    Args:
        func: the operation, with its arguments; args[0] is the batch.
        result: its result.
        rows: the number of rows of each call.
        layouts: layouts of args[0].
    """
    x, total = args[0], sum(rows)
    if not result.ndim or not isinstance(x, Tensor) or not x.ndim:
        return None
    if x.shape[0] % total or result.shape[0] % total:
        return None
    is_reshape = getattr(func, "__name__", "") in RESHAPES
    layouts_after: list[Strides | None] = []
    for i, n in enumerate(rows):
        before = layouts and layouts[i]
        if before is None and (n > 1 or not is_reshape):
            layouts_after.append(None)
            continue
        shape = (x.shape[0] // total * n, *x.shape[1:])
        alone = torch.empty_strided(shape, before or x.stride(), dtype=x.dtype, device="meta")
        rest = _scaled(args[1:], result, n, total) if is_reshape else args[1:]
        try:
            strides = func(alone, *rest, **kwargs).stride()
        except (RuntimeError, TypeError):
            return None
        layouts_after.append(None if strides == result.stride() else strides)
    return tuple(layouts_after) if any(s is not None for s in layouts_after) else None


def _scaled(args: Sequence[Any], result: Tensor, rows: int, total: int) -> tuple[Any, ...]:
    """The arguments of a reshape for one call: a first size equal to the batch is scaled."""
    first, size = args[0] if args else None, result.shape[0]
    if isinstance(first, int) and first == size and len(args) == result.ndim:
        return (first // total * rows, *args[1:])
    if isinstance(first, (list, tuple)) and len(first) == result.ndim and first[0] == size:
        return ((first[0] // total * rows, *first[1:]), *args[1:])
    return tuple(args)


def keep(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Tensor,
    rows: Sequence[int],
    layouts_of: Callable[[Tensor], Layouts | None],
    has_rows: Callable[[Tensor], bool],
) -> Layouts | None:
    """The layouts after an elementwise operation, found by a run on zeros per call.

    Torch derives the result's layout from the strides of all operands, with other rules for numbers
    and broadcasts; the meta device has different rules.

    Args:
        func: the operation, with its arguments.
        result: its result.
        rows: the number of rows of each call.
        layouts_of: returns the layouts of an operand.
        has_rows: whether axis 0 of an operand is the batch.
    """
    with_rows = [operand for operand in tensors(args, kwargs) if has_rows(operand)]
    if all(layouts_of(operand) is None for operand in with_rows):
        return None
    total = sum(rows)
    if any(not operand.ndim or operand.shape[0] % total for operand in with_rows):
        return None

    def alone(value: Any, i: int) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([alone(entry, i) for entry in value])
        if not isinstance(value, Tensor):
            return value
        layouts, shape = layouts_of(value), tuple(value.shape)
        if has_rows(value):
            shape = (shape[0] // total * rows[i], *shape[1:])
        strides = (layouts and layouts[i]) or value.stride()
        tensor = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        return tensor.zero_()

    strides_of_form: dict[Hashable, Strides | None] = {}
    layouts: list[Strides | None] = []
    for i, n in enumerate(rows):
        form = n, tuple([(layouts_of(operand) or {i: None})[i] for operand in with_rows])
        if form not in strides_of_form:
            named = {name: alone(value, i) for name, value in kwargs.items()}
            try:
                strides = func(*[alone(value, i) for value in args], **named).stride()
            except (RuntimeError, TypeError, IndexError):
                return None
            strides_of_form[form] = None if strides == result.stride() else strides
        layouts.append(strides_of_form[form])
    return tuple(layouts) if any(strides is not None for strides in layouts) else None


def layouts_of_parts(joined: Tensor, parts: Sequence[Any]) -> Layouts | None:
    """The layouts of the parts of a joined tensor; None if these are no parts of it."""
    if any(getattr(part, "shape", ())[1:] != joined.shape[1:] for part in parts):
        return None
    return tuple([None if p.stride() == joined.stride() else p.stride() for p in parts])


def as_alone(part: Tensor, strides: Strides | None) -> Tensor:
    """A part of a batch with the alignment and the layout that it would have alone."""
    if strides is not None and strides != part.stride():
        if part.shape[0] == 1 and strides[1:] == part.stride()[1:]:
            return part.as_strided(part.shape, strides, part.storage_offset())
        entries = part[tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)]
        tensor = torch.empty_strided(entries.shape, strides, dtype=part.dtype, device=part.device)
        return tensor.copy_(entries).expand(part.shape)  # stride 0: one entry, repeated
    if part.is_contiguous() and part.data_ptr() % ALIGNMENT_BYTES:
        return part.clone()
    return part


def join(parts: Sequence[Tensor]) -> tuple[Tensor, Layouts | None]:
    """Join the calls' parts in the layout of the widest part; returns their own layouts, too."""
    first = max(parts, key=lambda part: part.shape[0])
    if first.is_contiguous():
        joined = torch.cat(list(parts))
        if all(part.is_contiguous() for part in parts):
            return joined, None
    else:
        size, inner = first[0].numel(), first.stride()[1:]
        extent = 1 + sum((n - 1) * s for n, s in zip(first.shape[1:], inner, strict=True))
        if extent != size:  # not dense
            joined = torch.cat(list(parts))
        else:
            shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
            joined = first.new_empty_strided(shape, (size, *inner))
            torch.cat(list(parts), out=joined)
    layouts = layouts_of_parts(joined, parts)
    return joined, layouts if layouts and any(strides is not None for strides in layouts) else None
