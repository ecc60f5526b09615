"""A tensor of which each call in a forward has its own: keys and values of different lengths, say.

A model reads and writes it as any tensor. Operations on it run call by call, on each call's own
part and on its rows of the tensors beside it, so nothing is padded and no bit changes. What comes
out is one tensor again where it has the rows of all calls, as the output of attention has.
"""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from carpool.engine.digests import flag
from carpool.engine.operations import tensors

CACHES = ("Flux2KVCache", "Flux2KVLayerCache")  # classes that forwards of diffusers answer with
_FACTORIES = ("new_zeros", "new_ones", "new_empty", "new_full")
_SIZED = ("expand", "view", "reshape")  # operations whose first size may be all rows


class PerCall(Tensor):
    """A part for each call of a forward, whose numbers of rows are `rows`."""

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
    """Run an operation on tensors of which one at least is `PerCall`.

    Args:
        cut: the rows of each call of any other tensor; None: that has none.
        join: makes one tensor of the rows of all calls.

    Raises:
        ValueError: it gives numbers, which differ from call to call.
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
    """What must be equal of the objects that calls keep: all but lengths, content and `unread`.

    Raises:
        Unfusable: it holds more than tensors and plain values.
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
    """What a dict or an object holds, by name."""
    if isinstance(value, dict):
        return value
    is_plain = value is None or isinstance(value, (str, int, float, type, Tensor, nn.Module))
    return None if is_plain else getattr(value, "__dict__", None)


def mapped(make: Callable[[list[Any]], Any], values: Sequence[Any]) -> Any:
    """An object like those of equal `form`, with a tensor made of their tensors at each place."""
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
    """The part of one call of an object that all calls of a forward have filled.

    Raises:
        ValueError: a tensor in it does not have the rows of all calls.
    """

    def own(tensors: list[Tensor]) -> Tensor:
        if isinstance(whole := tensors[0], PerCall):
            return whole.parts[call]
        if whole.shape[:1] != (sum(rows),):
            raise ValueError(f"a tensor of shape {tuple(whole.shape)} has not {sum(rows)} rows")
        return torch.split(whole, list(rows))[call].clone()  # the others' end with their requests

    return mapped(own, [value])


def give_back(filled: Any, values: Sequence[Any], rows: Sequence[int]) -> None:
    """Put what a forward wrote into a joined object into each call's own one."""
    for call, value in enumerate(values):
        if filled is not values[0] and (own := entries_of(value)) is not None:
            own.update(entries_of(share(filled, call, rows)) or {})
