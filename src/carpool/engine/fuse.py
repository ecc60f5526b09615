"""Which calls may share a forward, and how they do: describe, stack, run.

`Fuser.describe` gives a call's fuse key and rows. Calls with equal keys can be handed to
`Fuser.run`, which makes one forward of them and gives each its own part of the answer. What
each argument means is said in `specs.py`; nothing here knows a model.
"""

import hashlib
import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from carpool.engine.intercept import Call, Target
from carpool.engine.numerics import DATA, ROW, ROWS, Exact
from carpool.engine.provenance import parts_of, source_of
from carpool.engine.specs import (
    CONCAT,
    LIST,
    SCALAR,
    SHARE,
    STACK,
    STACKS,
    UNUSED,
    Pad,
    Rule,
    Spec,
    State,
)
from carpool.engine.split import cut, own_lengths, split

MAX_STACKS = 32  # kept at once: about ten companies of three constants each
MAX_STACK_BYTES = 512 * 2**20


class Unfusable(Exception):
    """The call holds something that its spec does not cover: it has to run alone."""


class Fuser:
    """Makes one forward of several calls. Holds what is worth remembering between forwards.

    Args:
        is_exact: fused forwards give each call the bits that it gets alone; see `numerics.py`.
            Lengths are not padded then, and masks not made: both change the kernels.
    """

    def __init__(self, *, is_exact: bool = False) -> None:
        self.is_exact = is_exact
        self._digests = WeakTensorKeyDictionary()
        self._stacks: dict[tuple[int, ...], _Stack] = {}

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
            parts = [
                (name, self._part(target.spec.rules.get(name), value, rows, arguments))
                for name, value in sorted(arguments.items(), key=_name)
                if not self._is_said_anyway(target, name, value, rows)
            ]
        except (Unfusable, AttributeError, KeyError, TypeError):  # not what the rules foresee
            return _Alone(call), 1
        return (target.component, target.method, tuple(parts)), rows

    def alone(self, call: Call) -> Hashable:
        """A key that fuses with no other."""
        return _Alone(call)

    def run(self, calls: Sequence[Call], rows: Sequence[int]) -> list[Any]:
        """Run calls of one key as one forward.

        Args:
            calls: with equal keys; all of one method.
            rows: of each call, as `describe` gave it.

        Returns:
            What each call would have got alone, in order.
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
            exact: of these rows, not used before: the forward is run in exact numerics.
        """
        target, spec = calls[0].target, calls[0].target.spec
        assert spec is not None
        everyone = [call.arguments() for call in calls]
        if len(calls) > 1:
            _make_masks(spec, everyone)
        device = everyone[0][spec.rows][0].device
        rules, joined = spec.rules, dict(spec.adds)
        for name in everyone[0]:
            if all(name in one for one in everyone):  # else it was the default, or is not read
                values = [one[name] for one in everyone]
                joined[name] = self._join(rules.get(name), values, rows, device)
        if spec.casts:
            # a module whose weights are stored as float8 computes in another type, and says so
            weights = next(target.module.parameters()).dtype
            dtype = getattr(target.module, "dtype", weights)
            joined = {name: _cast(value, dtype) for name, value in joined.items()}
        if exact is None:
            answer = target.original(**joined)
        else:
            for name, value in joined.items():
                _mark(exact, spec.rules.get(name), name, value, everyone[0].get(name))
            with exact:
                answer = target.original(**joined)
        if len(calls) == 1:
            return [answer]
        parts = split(answer, rows, spec)
        lengths = own_lengths(spec, everyone)
        return [cut(part, spec, length) for part, length in zip(parts, lengths, strict=True)]

    def _part(
        self, rule: Rule | None, value: Any, rows: int, arguments: Mapping[str, Any]
    ) -> Hashable:
        """What the key says of one argument: all that must be equal for it to fuse."""
        if value is None:
            return None
        if rule is None:
            return _flag(value)
        if isinstance(rule, Mapping) and isinstance(value, Mapping):
            entries = [(n, self._part(rule.get(n), value[n], rows, arguments)) for n in value]
            return tuple(sorted(entries, key=_name))
        if isinstance(rule, State):
            if (state := rule.key(value)) is None:
                raise Unfusable
            return state
        if rule is STACKS:
            fits = all(isinstance(v, Tensor) and v.ndim and v.shape[0] == rows for v in value)
            if not fits or not isinstance(value, (list, tuple)):
                raise Unfusable
            return tuple((v.dtype, v.device, tuple(v.shape[1:])) for v in value)
        if rule is LIST:
            if len(value) != rows or not all(isinstance(entry, Tensor) for entry in value):
                raise Unfusable
            return value[0].dtype, value[0].device, value[0].ndim
        if rule is SCALAR and not isinstance(value, Tensor):
            return str(type(value))
        if rule is SHARE and isinstance(value, (list, tuple)) and value:
            return type(value), tuple(self._digest(entry) for entry in value)
        if not isinstance(value, Tensor):
            raise Unfusable
        if rule is SHARE:
            return self._digest(value)
        if rule is SCALAR and not value.ndim:
            return value.dtype, value.device
        shape = list(value.shape)
        if not shape or (shape[0] != rows and rule is not CONCAT):
            raise Unfusable
        if isinstance(rule, Pad) and rule.places and self.is_exact:
            return self._digest(value)
        if isinstance(rule, Pad) and (rule.makes_mask or arguments.get(rule.mask) is not None):
            is_tuple = arguments.get("return_dict") is False  # has no names to cut back by
            if not (rule.cut and is_tuple) and not self.is_exact:
                shape[rule.axis] = -1
        return value.dtype, value.device, tuple(shape[1:])

    def content(self, value: Any) -> Hashable:
        """What tells arguments of different content apart: a digest of each tensor."""
        if isinstance(value, Tensor):
            return id(value) if value.is_inference() else self._digest(value)
        if isinstance(value, Mapping):
            return tuple(sorted(((str(n), self.content(v)) for n, v in value.items()), key=_name))
        if isinstance(value, (list, tuple)):
            return tuple(self.content(entry) for entry in value)
        return repr(value)

    def _is_said_anyway(self, target: Target, name: str, value: Any, rows: int) -> bool:
        """Whether calls that leave this argument out, or pass another, may share its forward."""
        rule = target.spec.rules.get(name) if target.spec else None
        if rule is UNUSED:
            return True
        makes_mask = isinstance(rule, Pad) and rule.makes_mask and rule.mask == name
        if makes_mask and value is not None:
            is_plain = value.dtype in (torch.int64, torch.bool) and value.shape[:-1] == (rows,)
            return is_plain and not self.is_exact
        default = target.defaults.get(name, target)  # `target`: equal to no argument
        return type(value) is type(default) and isinstance(value, _PLAIN) and bool(value == default)

    def _digest(self, value: Tensor) -> Hashable:
        """A fingerprint of a tensor's content, computed once for every object (and version)."""
        if value.is_inference():
            raise Unfusable  # does not count its versions: a change would go unseen
        version = value._version
        known = self._digests.get(value)  # type: ignore[no-untyped-call]
        if known is None or known[0] != version:
            if (made_of := parts_of(value)) is not None:
                axis, parts = made_of
                raw = repr((axis, [self._digest(part) for part in parts])).encode()
            else:
                source = source_of(value)
                flat = (value if source is None else source).detach().reshape(-1).cpu()
                flat = flat.clone(memory_format=torch.contiguous_format)  # expanded: strides of 0
                raw = flat.view(torch.uint8).numpy().tobytes()
            known = (version, hashlib.blake2b(raw, digest_size=16).digest())
            self._digests[value] = known
        return value.dtype, value.device, tuple(value.shape), known[1]

    def _join(
        self, rule: Rule | None, values: Sequence[Any], rows: Sequence[int], device: torch.device
    ) -> Any:
        first = values[0]
        if first is None or rule in (None, SHARE, UNUSED) or len(values) == 1:
            return first
        if isinstance(rule, State):
            return first
        if rule is STACKS:
            return type(first)(torch.cat(column) for column in zip(*values, strict=True))
        if isinstance(rule, Mapping):
            return {n: self._join(rule.get(n), [v[n] for v in values], rows, device) for n in first}
        if rule is LIST:
            return [entry for value in values for entry in value]
        if rule is SCALAR:
            return torch.cat([_expand(v, n, device) for v, n in zip(values, rows, strict=True)])
        if isinstance(rule, Pad):
            return torch.cat(_padded(values, rule.axis))
        return self._stack(values)

    def _stack(self, values: Sequence[Tensor]) -> Tensor:
        """Concatenate along the rows, or reuse what the same tensors gave before.

        Text embeddings are the same objects at every step, latents never are. So a stack is only
        kept from the second time on, and is dropped as soon as one of its parts is gone.
        """
        if any(value.is_inference() for value in values):
            return torch.cat(list(values))  # such tensors do not count their versions
        ids = tuple([id(value) for value in values])
        versions = tuple([value._version for value in values])
        known = self._stacks.pop(ids, None)
        if known is None or known.versions != versions:
            forget = _Forget(self._stacks, ids)
            self._stacks[ids] = _Stack(versions, [weakref.ref(v, forget) for v in values])
            return torch.cat(list(values))
        if len(self._stacks) >= MAX_STACKS:
            del self._stacks[next(iter(self._stacks))]  # the one not used for longest
        self._stacks[ids] = known
        if known.joined is None or known.joined._version != known.joined_version:
            known.joined = torch.cat(list(values))
            known.joined_version = known.joined._version
            joined = known.joined
            self._drop_stacks_above(MAX_STACK_BYTES)
            return joined
        return known.joined

    def forget(self) -> None:
        """Drop what is only kept for speed: memory is short."""
        self._stacks.clear()

    def _drop_stacks_above(self, most_bytes: int) -> None:
        kept = ((ids, one.joined) for ids, one in self._stacks.items())
        held = [(ids, joined.nbytes) for ids, joined in kept if joined is not None]
        total = sum(size for _, size in held)
        for ids, size in held:  # the one not used for longest first
            if total <= most_bytes:
                return
            del self._stacks[ids]
            total -= size


class _Alone:
    """The key of a call that fuses with no other: equal to itself only."""

    def __init__(self, call: Call) -> None:
        self._name = f"{call.target.component}.{call.target.method}"

    def __repr__(self) -> str:
        return f"<alone: {self._name}>"


@dataclass(slots=True)
class _Stack:
    versions: tuple[int, ...]
    parts: list[weakref.ref[Tensor]]  # alive: their ids still mean them
    joined: Tensor | None = None
    joined_version: int = 0


class _Forget:
    """Drops a remembered stack when one of its parts dies."""

    def __init__(self, stacks: dict[tuple[int, ...], _Stack], ids: tuple[int, ...]) -> None:
        self._stacks, self._ids = stacks, ids

    def __call__(self, _: object) -> None:
        self._stacks.pop(self._ids, None)


def _name(entry: tuple[str, Hashable]) -> str:
    return entry[0]


def _flag(value: Any) -> Hashable:
    """A plain Python value as part of a key."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), value  # True, 1 and 1.0 are equal in Python, not to a model
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_flag(entry) for entry in value)
    if isinstance(value, Mapping):
        return tuple(sorted(((str(n), _flag(v)) for n, v in value.items()), key=_name))
    raise Unfusable


def _mark(exact: Exact, rule: Rule | None, name: str, value: Any, alone: Any) -> None:
    """Tell the exact mode what a joined argument carries."""
    if isinstance(rule, Mapping) and isinstance(value, Mapping):
        for entry, its_rule in rule.items():
            _mark(exact, its_rule, entry, value.get(entry), alone.get(entry))
    elif rule is LIST:
        exact.mark(value, ROW | DATA)
    elif rule in (STACK, STACKS, CONCAT, SCALAR) or isinstance(rule, Pad):
        exact.mark(value, ROWS | (0 if _is_length(name, alone) else DATA))


def _is_length(name: str, value: Any) -> bool:
    """Whether an argument is one of masks, lengths or ids, on which a model may well decide."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        return isinstance(value, Tensor) and "mask" in name
    return value.ndim >= 2 or "len" in name


_PLAIN = (bool, int, float, str, type(None))


def _make_masks(spec: Spec, everyone: Sequence[dict[str, Any]]) -> None:
    """Where lengths differ, give calls without a mask one of ones, in place."""
    for name, rule in spec.rules.items():
        if not isinstance(rule, Pad) or not rule.makes_mask or name == rule.mask:
            continue
        if everyone[0].get(name) is None:
            continue
        values = [arguments[name] for arguments in everyone]
        masks = [arguments.get(rule.mask) for arguments in everyone]
        if all(mask is None for mask in masks):
            if len({value.shape[rule.axis] for value in values}) == 1:
                continue  # as it would be alone: other kernels are not as exact
            dtype = torch.int64
        else:
            dtype = next(mask.dtype for mask in masks if mask is not None)
        for arguments, value, mask in zip(everyone, values, masks, strict=True):
            ones = (value.shape[0], value.shape[rule.axis])
            arguments[rule.mask] = (
                torch.ones(ones, dtype=dtype, device=value.device)
                if mask is None
                else mask.to(dtype)
            )


def decode_bytes(call: Call) -> int:
    """Memory that a row of a decode takes at its peak, where its table says so; else 0."""
    spec = call.target.spec
    if spec is None or not spec.peak:
        return 0
    latents: Tensor = call.arguments()[spec.rows]
    return spec.peak * math.prod(latents.shape[2:]) * latents.element_size()


def _expand(value: Any, rows: int, device: torch.device) -> Tensor:
    """One number for each row: a 0-d tensor or Python number repeated, a vector as it is."""
    if isinstance(value, Tensor) and value.ndim == 1 and value.device == device:
        return value  # the usual case
    number: Tensor = torch.as_tensor(value, device=device)
    return number.reshape(1).expand(rows) if number.ndim == 0 else number


def _padded(values: Sequence[Tensor], axis: int) -> list[Tensor]:
    longest = max(value.shape[axis] for value in values)
    after = [0, 0] * (values[0].ndim - 1 - axis)  # `pad` counts axes from the last
    return [pad(value, [*after, 0, longest - value.shape[axis]]) for value in values]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
