"""A tensor with a private part for each call of a forward, such as keys of different lengths.

A model reads and writes it like any tensor. Operations on it run call by call, on each call's part
and on its rows of the other operands, so nothing is padded and no bit changes. A result that has
the rows of all calls, such as the output of attention, is one tensor again.
"""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from carpool.engine.digests import flag
from carpool.engine.operations import tensors

CACHES = ("Flux2KVCache", "Flux2KVLayerCache")  # answers of diffusers' forwards
_FACTORIES = ("new_zeros", "new_ones", "new_empty", "new_full")
_SIZED = ("expand", "view", "reshape")  # operations whose first size may be the total of rows


class PerCall(Tensor):
    """One part for each call of a forward; `rows` are the calls' numbers of rows."""

    parts: Sequence[Tensor]
    rows: Sequence[int]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], rows: Sequence[int]) -> "PerCall":
        value: PerCall = torch.Tensor._make_subclass(cls, torch.empty(0))
        value.parts, value.rows = parts, rows
        return value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rows = next(t.rows for t in tensors(args, kwargs) if isinstance(t, PerCall))

        def cut(value: Tensor) -> Sequence[Tensor] | None:
            has_rows = value.ndim and value.shape[0] == sum(rows)
            is_weight = isinstance(value, nn.Parameter)
            return torch.split(value, list(rows)) if has_rows and not is_weight else None

        return by_call(func, args, kwargs, rows, cut, lambda parts: torch.cat(list(parts)))


def by_call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: Sequence[int],
    cut: Callable[[Tensor], Sequence[Tensor] | None],
    join: Callable[[Sequence[Tensor]], Tensor],
) -> Any:
    """Run an operation call by call; at least one operand is `PerCall`.

    Args:
        cut: returns each call's rows of any other tensor; None: it has no rows.
        join: joins the results of all calls into one tensor.

    Raises:
        ValueError: its plain results differ between calls.
    """
    total, has_rows, name = sum(rows), False, getattr(func, "__name__", "")

    def column(value: Any) -> Sequence[Any]:
        nonlocal has_rows
        if isinstance(value, PerCall):
            return value.parts
        if isinstance(value, Tensor) and (parts := cut(value)) is not None:
            has_rows = True
            return parts
        if isinstance(value, (list, tuple)) and any(isinstance(e, Tensor) for e in value):
            return [type(value)(row) for row in zip(*map(column, value), strict=True)]
        return (value,) * len(rows)

    columns, named = [column(value) for value in args], {n: column(v) for n, v in kwargs.items()}
    if name in _FACTORIES + _SIZED and isinstance(args[0], PerCall):
        size = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        if size[0] == total and name in _FACTORIES:
            return func(args[0].parts[0], *args[1:], **kwargs)
        if size[0] == total:
            columns[1:] = [[(n, *size[1:]) for n in rows]]
    results = [
        func(*[entry[i] for entry in columns], **{n: entry[i] for n, entry in named.items()})
        for i in range(len(rows))
    ]
    is_in_place = name.endswith("_") and not name.endswith("__")
    return args[0] if is_in_place else _joined(results, rows, join if has_rows else None)


def _joined(results: Sequence[Any], rows: Sequence[int], join: Any) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        shapes = [result.shape for result in results]
        has_rows = [shape[:1] for shape in shapes] == [(n,) for n in rows]
        if join is not None and has_rows and len({shape[1:] for shape in shapes}) == 1:
            return join(results)
        return PerCall(results, rows)
    if isinstance(first, (tuple, list)) and any(isinstance(entry, Tensor) for entry in first):
        return [_joined(column, rows, join) for column in zip(*results, strict=True)]
    if any(result != first for result in results):
        raise ValueError(f"calls of one forward differ: {first} and others")
    return first


def form(value: Any, unread: Sequence[str] = ()) -> Hashable:
    """The part of a call's private object that must be equal: not lengths, content, `unread`.

    Raises:
        Unfusable: it holds values other than tensors and plain values.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.ndim, value.shape[-1:]
    if isinstance(value, (list, tuple)):
        return type(value), *[form(entry, unread) for entry in value]
    if (entries := entries_of(value)) is not None:
        named = [(n, form(entry, unread)) for n, entry in entries.items() if n not in unread]
        return type(value).__qualname__, *named
    return flag(value)


def entries_of(value: Any) -> dict[Any, Any] | None:
    """The entries of a dict or the attributes of an object; None: neither."""
    if isinstance(value, dict):
        return value
    is_plain = value is None or isinstance(value, (str, int, float, type, Tensor, nn.Module))
    return None if is_plain else getattr(value, "__dict__", None)


def mapped(make: Callable[[list[Any]], Any], values: Sequence[Any]) -> Any:
    """Combine objects of equal `form`: `make` combines the tensors at each place."""
    first = values[0]
    if isinstance(first, Tensor):
        return make(list(values))
    if isinstance(first, (list, tuple)):
        return type(first)(mapped(make, column) for column in zip(*values, strict=True))
    if (entries := entries_of(first)) is None:
        return first
    own = [entries_of(value) or {} for value in values]
    made = {name: mapped(make, [entry[name] for entry in own]) for name in entries}
    if isinstance(first, dict):
        return type(first)(made)
    other = copy.copy(first)
    vars(other).update(made)
    return other


def share(value: Any, call: int, rows: Sequence[int]) -> Any:
    """Extract one call's part of an object that a forward has filled for all its calls.

    Raises:
        ValueError: a tensor in it does not have the rows of all calls.
    """

    def own(tensors: list[Tensor]) -> Tensor:
        if isinstance(whole := tensors[0], PerCall):
            return whole.parts[call]
        if whole.shape[:1] != (sum(rows),):
            raise ValueError(f"a tensor of shape {tuple(whole.shape)} has not {sum(rows)} rows")
        return torch.split(whole, list(rows))[call].clone()  # a view would keep all rows alive

    return mapped(own, [value])


def give_back(filled: Any, values: Sequence[Any], rows: Sequence[int]) -> None:
    """Copy a forward's writes in a joined object to the objects of the calls."""
    for call, value in enumerate(values):
        if filled is not values[0] and (own := entries_of(value)) is not None:
            own.update(entries_of(share(filled, call, rows)) or {})
