"""Fuse calls into shared forwards: describe, stack, run, split.

`Fuser.describe` returns a call's fuse key and rows. `Fuser.run` runs calls with equal keys as one
forward and returns to each its own part of the answer. The tables in `specs/` define the meaning
of each argument; this module knows no model.
"""

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from carpool.engine.digests import Digests, Unfusable
from carpool.engine.intercept import Call, Target, computes_together
from carpool.engine.language.parts import PREFILL
from carpool.engine.nested import tensors_in
from carpool.engine.numerics import DATA, ROW, ROWS, Exact, is_followed
from carpool.engine.specs.rule import PLAIN, JoinContext, KeyContext, Rule
from carpool.engine.split import split


class Fuser:
    """Runs several calls as one forward. Caches digests between forwards.

    Args:
        is_exact: each call gets the same bits in a fused forward as alone; see `numerics.py`. Then
            lengths are not padded and no masks are added: both change the kernels.
    """

    def __init__(self, *, is_exact: bool = False) -> None:
        self.is_exact = is_exact
        self.digests = Digests()
        self._followed: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def describe(self, call: Call) -> tuple[Hashable, int]:
        """The fuse key and the number of rows of a call.

        A call that cannot fuse gets a key of its own, equal to no other, and counts one row.
        """
        target = call.target
        if target.spec is None or target.is_exclusive:
            return Alone(call), 1
        arguments = call.arguments()
        if any(arguments.get(name) is None for name in target.spec.needs):
            return Alone(call), 1
        try:
            rows = len(arguments[target.spec.rows])
            if not rows:
                return Alone(call), 1
            context = KeyContext(rows, arguments, self.digests, self.is_exact, self._follows(call))
            parts = [
                (name, target.spec.rule(name).key_part(value, context))
                for name, value in sorted(arguments.items(), key=itemgetter(0))
                if not self._is_implied(target, name, value, context)
            ]
        except (Unfusable, AttributeError, KeyError, TypeError):  # no rule covers it
            return Alone(call), 1
        if target.modes:
            parts.append(("modes", target.modes))
        method = "generate" if target.method == PREFILL else target.method  # the same decoder
        return (target.component, method, tuple(parts)), rows

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
            [_] = calls  # calls without a table never share a key
            return [target.original(*first.args, **first.kwargs)]
        if len(calls) == 1 and not spec.casts:
            return [target.original(*first.args, **{**spec.adds, **first.kwargs})]
        exact = Exact(rows) if self.is_exact and len(calls) > 1 else None
        return self.fused(calls, rows, exact)

    def fused(
        self, calls: Sequence[Call], rows: Sequence[int], exact: Exact | None = None
    ) -> list[Any]:
        """Run calls of one key that has a table as one forward; see `run`.

        Args:
            exact: a fresh mode for these rows: run the forward in exact numerics.
        """
        target, spec = calls[0].target, calls[0].target.spec
        assert spec is not None
        batch = [call.arguments() for call in calls]
        rules = [(name, spec.rule(name)) for name in spec.rules]
        if len(calls) > 1:
            for name, rule in rules:
                rule.align(name, batch, target.defaults)
        device = next(tensors_in(batch[0][spec.rows])).device
        context = JoinContext(rows, device, batch[0], exact is not None)
        fused = dict(spec.adds)
        for name in batch[0]:
            values = [arguments[name] for arguments in batch if name in arguments]
            if len(values) == len(calls):  # else a call left it at its default, or it is not read
                fused[name] = spec.rule(name).fuse(values, context)
        if spec.casts:
            module = target.module  # with weights in float8 it computes in another type
            dtype = getattr(module, "dtype", None) or next(module.parameters()).dtype
            for name, value in fused.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    fused[name] = value.to(dtype)
        lists = {name: list(value) for name, value in fused.items() if type(value) is list}
        if exact is not None:
            for name, value in fused.items():
                values = [arguments.get(name) for arguments in batch]
                for leaf in spec.rule(name).leaves(name, value, values):
                    _mark(exact, *leaf)
        within = nullcontext() if spec.within is None else spec.within(target.module, batch, rows)
        with within, exact or nullcontext():
            answer = target.original(**fused)
        if len(calls) == 1:
            return [answer]
        for name, rule in rules:
            if batch[0].get(name) is not None and name in fused:
                rule.give_back(fused[name], [arguments.get(name) for arguments in batch], rows)
        for name, entries in lists.items():
            if len(fused[name]) != len(entries) and type(batch[0].get(name)) is list:
                _take_out(entries, fused[name], [arguments[name] for arguments in batch])
        parts = split(answer, rows, spec)
        for name, rule in rules:
            parts = rule.divide([arguments.get(name) for arguments in batch], parts)
        return parts

    def _is_implied(self, target: Target, name: str, value: Any, context: KeyContext) -> bool:
        """Whether a call with this argument may share a forward with calls that lack or vary it."""
        if target.spec is not None and target.spec.rule(name).is_implied(name, value, context):
            return True
        if name == target.idle_scale and (not value or value.keys() == {"scale"}):
            return True
        default = target.defaults.get(name, target)  # `target`: equals no argument
        return type(value) is type(default) and isinstance(value, PLAIN) and bool(value == default)

    def _follows(self, call: Call) -> bool:
        if (module := call.target.module) not in self._followed:
            self._followed[module] = is_followed(module) and not computes_together(module)
        return self._followed[module] and not (call.lora and self.is_exact)


class Alone:
    """The key of a call that runs alone: equal only to itself."""

    def __init__(self, call: Call) -> None:
        self._name = f"{call.target.component}.{call.target.method}"

    def __repr__(self) -> str:
        return f"<alone: {self._name}>"


def _take_out(before: list[Any], after: list[Any], lists: Sequence[list[Any]]) -> None:
    """Remove from each call's list the entries that the forward removed from the joined list."""
    places = [i for i, entry in enumerate(before) if any(entry is survivor for survivor in after)]
    for entries in lists:
        entries[:] = [entries[i] for i in places]


def _mark(exact: Exact, rule: Rule, name: str, value: Any, values: Sequence[Any]) -> None:
    """Mark a joined argument for the exact mode."""
    if rule.mark == "row":
        exact.mark(value, ROW | DATA)
    elif rule.mark:
        exact.mark(value, ROWS | (0 if _is_length(name, values[0]) else DATA), values)


def _is_length(name: str, value: Any) -> bool:
    """Whether an argument holds masks, lengths or ids: a model's control flow may depend on it."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        return isinstance(value, Tensor) and "mask" in name
    return value.ndim >= 2 or "len" in name


def decode_bytes(call: Call) -> int:
    """Peak bytes of one row of a decode, by its table; 0 where the table states none."""
    spec = call.target.spec
    if spec is None or not spec.peak:
        return 0
    latents: Tensor = call.arguments()[spec.rows]
    return spec.peak * math.prod(latents.shape[2:]) * latents.element_size()
