"""Which calls may share a forward, and how they do: describe, stack, run.

`Fuser.describe` gives a call's fuse key and rows. Calls with equal keys can be handed to
`Fuser.run`, which makes one forward of them and gives each its own part of the answer. The
tables in `specs/` say what each argument means; nothing here knows a model.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from carpool.engine.digests import Digests, Unfusable, flag, name_of
from carpool.engine.intercept import Call, Target
from carpool.engine.numerics import DATA, ROW, ROWS, Exact
from carpool.engine.padding import make_masks, padded
from carpool.engine.specs import (
    CONCAT,
    FACTOR,
    LAYERS,
    LIST,
    SCALAR,
    SHARE,
    STACK,
    STACKS,
    UNUSED,
    ArgumentRule,
    Keyed,
    Pad,
    State,
)
from carpool.engine.split import cut, own_lengths, scaled, split
from carpool.engine.stacks import Stacks


class Fuser:
    """Makes one forward of several calls. Keeps joined tensors and digests between forwards.

    Args:
        is_exact: fused forwards give each call the bits that it gets alone; see `numerics.py`.
            Lengths are not padded then, and masks not made: both change the kernels.
    """

    def __init__(self, *, is_exact: bool = False) -> None:
        self.is_exact = is_exact
        self._digests = Digests()
        self._dtypes: dict[tuple[int, torch.dtype], torch.dtype] = {}  # see `_dtype`
        self.stacks = Stacks()

    def describe(self, call: Call) -> tuple[Hashable, int]:
        """The fuse key and the number of rows of a call.

        A call that cannot fuse gets a key of its own, equal to no other, and counts one row.
        """
        target = call.target
        if target.spec is None or target.is_exclusive:
            return _Alone(call), 1
        arguments = call.arguments()
        if any(arguments.get(name) is None for name in target.spec.needs):
            return _Alone(call), 1
        try:
            rows = len(arguments[target.spec.rows])
            if not rows:
                return _Alone(call), 1
            parts = [
                (name, self._part(target.spec.rules.get(name), value, rows, arguments))
                for name, value in sorted(arguments.items(), key=name_of)
                if not self._is_said_anyway(target, name, value, rows)
            ]
        except (Unfusable, AttributeError, KeyError, TypeError):  # the rules do not cover it
            return _Alone(call), 1
        if target.modes:
            parts.append(("modes", target.modes))
        return (target.component, target.method, tuple(parts)), rows

    def alone(self, call: Call) -> Hashable:
        """A key that fuses with no other."""
        return _Alone(call)

    def run(self, calls: Sequence[Call], rows: Sequence[int]) -> list[Any]:
        """Run calls of one key as one forward.

        Args:
            calls: calls with equal keys, all of one method.
            rows: the number of rows of each call, from `describe`.

        Returns:
            The answer that each call would have got alone, in order.
        """
        target, first = calls[0].target, calls[0]
        spec = target.spec
        if spec is None:
            [_] = calls  # such calls never share a key
            return [target.original(*first.args, **first.kwargs)]
        if len(calls) == 1 and not spec.casts:
            return [target.original(*first.args, **{**spec.adds, **first.kwargs})]
        exact = Exact(rows) if self.is_exact and len(calls) > 1 else None
        return self.fused(calls, rows, exact)

    def fused(
        self, calls: Sequence[Call], rows: Sequence[int], exact: Exact | None = None
    ) -> list[Any]:
        """Run calls of one key, which have a table, as one forward; see `run`.

        Args:
            exact: an unused mode for these rows: the forward is run in exact numerics.
        """
        target, spec = calls[0].target, calls[0].target.spec
        assert spec is not None
        batch = [call.arguments() for call in calls]
        if len(calls) > 1:
            make_masks(spec, batch)
        leading = batch[0][spec.rows]  # it may have no rows
        device = (leading if isinstance(leading, Tensor) else leading[0]).device
        rules, joined = spec.rules, dict(spec.adds)
        for name in batch[0]:
            values = [arguments[name] for arguments in batch if name in arguments]
            if len(values) == len(calls):  # else it was the default, or is not read
                joined[name] = self._join(rules.get(name), values, rows, device)
        factors = _factors(target, batch)
        joined |= dict.fromkeys(factors, 1.0)
        if spec.casts:
            dtype = self._dtype(target.module)
            joined = {name: _cast(value, dtype) for name, value in joined.items()}
        lists = {name: list(value) for name, value in joined.items() if type(value) is list}
        if exact is None:
            answer = target.original(**joined)
        else:
            for name, value in joined.items():
                _mark(exact, spec.rules.get(name), name, value, batch[0].get(name))
            with exact:
                answer = target.original(**joined)
        if len(calls) == 1:
            return [answer]
        for name, entries in lists.items():
            if len(joined[name]) != len(entries) and type(batch[0].get(name)) is list:
                _take_out(entries, joined[name], [arguments[name] for arguments in batch])
        parts = split(answer, rows, spec)
        for values in factors.values():
            parts = [scaled(part, value) for part, value in zip(parts, values, strict=True)]
        lengths = own_lengths(spec, batch)
        return [cut(part, spec, length) for part, length in zip(parts, lengths, strict=True)]

    def _dtype(self, module: nn.Module) -> torch.dtype:
        """The number type that a module computes in, asked once while its weights are of one type.

        One whose weights are stored as float8 computes in another type, and says so, but diffusers
        looks at every weight to answer.
        """
        stored = next(module.parameters()).dtype
        place = id(module), stored
        if place not in self._dtypes:
            self._dtypes[place] = getattr(module, "dtype", stored)
        return self._dtypes[place]

    def _part(
        self, rule: ArgumentRule | None, value: Any, rows: int, arguments: Mapping[str, Any]
    ) -> Hashable:
        """One argument's part of the fuse key: all that must be equal for it to fuse."""
        if value is None:
            return None
        if rule is None:
            return flag(value)
        if isinstance(rule, Keyed):
            return rule.key(value), self._part(rule.rule, value, rows, arguments)
        if isinstance(rule, Mapping) and isinstance(value, Mapping):
            entries = [(n, self._part(rule.get(n), value[n], rows, arguments)) for n in value]
            return tuple(sorted(entries, key=name_of))
        if isinstance(rule, State):
            if (state := rule.key(value)) is None:
                raise Unfusable
            return state
        if rule is STACKS:
            if not isinstance(value, (list, tuple, dict)):
                raise Unfusable
            parts = value.values() if isinstance(value, dict) else value
            if not all(isinstance(v, Tensor) and v.ndim and v.shape[0] == rows for v in parts):
                raise Unfusable
            names = tuple(value) if isinstance(value, dict) else type(value)
            return names, tuple((v.dtype, v.device, tuple(v.shape[1:])) for v in parts)
        if rule is LAYERS:
            if value.ndim < 2 or value.shape[1] != rows:
                raise Unfusable
            return value.dtype, value.device, (value.shape[0], *value.shape[2:])
        if rule is LIST:
            if len(value) != rows or not all(isinstance(entry, Tensor) for entry in value):
                raise Unfusable
            return value[0].dtype, value[0].device, value[0].ndim
        if rule is SCALAR and not isinstance(value, Tensor):
            return str(type(value))
        if rule is SHARE and isinstance(value, (list, tuple)) and value:
            return self._digests.nested(value)
        if rule is CONCAT and isinstance(value, (list, tuple)):
            return type(value), tuple(self._part(CONCAT, entry, rows, arguments) for entry in value)
        if not isinstance(value, Tensor):
            raise Unfusable
        if rule is SHARE:
            return self._digests.of(value)
        if rule is SCALAR and not value.ndim:
            return value.dtype, value.device
        shape = list(value.shape)
        if not shape or (shape[0] != rows and rule is not CONCAT):
            raise Unfusable
        if isinstance(rule, Pad) and rule.places and self.is_exact:
            return self._digests.of(value)
        if isinstance(rule, Pad) and (rule.makes_mask or arguments.get(rule.mask) is not None):
            is_tuple = arguments.get("return_dict") is False  # has no names to cut back by
            if shape[rule.axis] and not (rule.cut and is_tuple) and not self.is_exact:
                shape[rule.axis] = -1  # a length of 0 stays: all of its padding would be hidden
        return value.dtype, value.device, tuple(shape[1:])

    def content(self, value: Any) -> Hashable:
        """A value that tells arguments of different content apart: a digest of each tensor."""
        return self._digests.content(value)

    def _is_said_anyway(self, target: Target, name: str, value: Any, rows: int) -> bool:
        """Whether calls that leave this argument out, or pass another, may share its forward."""
        rule = target.spec.rules.get(name) if target.spec else None
        if rule is UNUSED:
            return True
        if rule is FACTOR and type(value) in (int, float):
            return not self.is_exact  # a product of sums is not to the bit the sum of products
        makes_mask = isinstance(rule, Pad) and rule.makes_mask and rule.mask == name
        if makes_mask and value is not None:
            is_plain = value.dtype in (torch.int64, torch.bool) and value.shape[:-1] == (rows,)
            return is_plain and not self.is_exact
        default = target.defaults.get(name, target)  # `target`: equal to no argument
        return type(value) is type(default) and isinstance(value, _PLAIN) and bool(value == default)

    def _join(
        self,
        rule: ArgumentRule | None,
        values: Sequence[Any],
        rows: Sequence[int],
        device: torch.device,
    ) -> Any:
        first = values[0]
        if isinstance(rule, Keyed):
            rule = rule.rule
        if first is None or rule in (None, SHARE, UNUSED, FACTOR) or len(values) == 1:
            return first
        if isinstance(rule, State):
            return first if rule.join is None else rule.join(values)
        if rule is STACKS and isinstance(first, dict):
            return {n: torch.cat([value[n] for value in values]) for n in first}
        if rule is STACKS or (rule is CONCAT and isinstance(first, (list, tuple))):
            columns = zip(*values, strict=True)
            return type(first)(c[0] if c[0] is None else torch.cat(c) for c in columns)
        if rule is LAYERS:
            return [torch.cat(layers) for layers in zip(*values, strict=True)]
        if isinstance(rule, Mapping):
            return {n: self._join(rule.get(n), [v[n] for v in values], rows, device) for n in first}
        if rule is LIST:
            return [entry for value in values for entry in value]
        if rule is SCALAR:
            return torch.cat([_expand(v, n, device) for v, n in zip(values, rows, strict=True)])
        if isinstance(rule, Pad):
            return torch.cat(padded(values, rule.axis))
        return self.stacks.join(values)

    def forget(self) -> None:
        """Drop tensors that are only kept for speed: memory is short."""
        self.stacks.clear()


class _Alone:
    """The key of a call that fuses with no other: equal to itself only."""

    def __init__(self, call: Call) -> None:
        self._name = f"{call.target.component}.{call.target.method}"

    def __repr__(self) -> str:
        return f"<alone: {self._name}>"


def _factors(target: Target, batch: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The numbers that the answers of calls are multiplied by, where they are not all equal."""
    rules = target.spec.rules if target.spec else {}
    names = [name for name, rule in rules.items() if rule is FACTOR]
    values = {n: [arguments.get(n, target.defaults.get(n)) for arguments in batch] for n in names}
    return {name: own for name, own in values.items() if any(value != own[0] for value in own)}


def _take_out(before: list[Any], after: list[Any], lists: Sequence[list[Any]]) -> None:
    """Take the entries out of the lists of calls that a forward took out of its joined list."""
    places = [i for i, entry in enumerate(before) if any(entry is kept for kept in after)]
    for entries in lists:
        entries[:] = [entries[i] for i in places]


def _mark(exact: Exact, rule: ArgumentRule | None, name: str, value: Any, alone: Any) -> None:
    """Mark a joined argument for the exact mode."""
    if isinstance(rule, Keyed):
        rule = rule.rule
    if isinstance(rule, Mapping) and isinstance(value, Mapping):
        for entry, its_rule in rule.items():
            _mark(exact, its_rule, entry, value.get(entry), alone.get(entry))
    elif rule is LIST:
        exact.mark(value, ROW | DATA)
    elif rule in (STACK, STACKS, CONCAT, SCALAR, LAYERS) or isinstance(rule, Pad):
        exact.mark(value, ROWS | (0 if _is_length(name, alone) else DATA))


def _is_length(name: str, value: Any) -> bool:
    """Whether an argument is one of masks, lengths or ids, on which a model may well decide."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        return isinstance(value, Tensor) and "mask" in name
    return value.ndim >= 2 or "len" in name


_PLAIN = (bool, int, float, str, type(None))


def decode_bytes(call: Call) -> int:
    """Bytes that a row of a decode takes at its peak, by its table; 0 where the table has none."""
    spec = call.target.spec
    if spec is None or not spec.peak:
        return 0
    latents: Tensor = call.arguments()[spec.rows]
    return spec.peak * math.prod(latents.shape[2:]) * latents.element_size()


def _expand(value: Any, rows: int, device: torch.device) -> Tensor:
    """One number for each row: a single number is repeated, a vector stays as it is."""
    if isinstance(value, Tensor) and value.ndim == 1 and value.device == device:
        return value  # the usual case
    number: Tensor = torch.as_tensor(value, device=device)
    return number.reshape(1).expand(rows) if number.ndim == 0 else number


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
