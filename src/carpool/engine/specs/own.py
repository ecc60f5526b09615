"""Rules for arguments private to each call, such as keys and values of different lengths."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

import torch

from carpool.engine import per_call
from carpool.engine.digests import Unfusable
from carpool.engine.specs.rule import JoinContext, KeyContext, NoTest, RowMark, Rule, Test


@dataclass(frozen=True, slots=True)
class Own(Rule):
    """Tensors, or an object that holds some, private to each call.

    A forward reads and writes those of all its calls; see `per_call`. Their lengths may differ.
    """

    unread: tuple[str, ...] = ()  # attributes that may differ
    if_exact: bool = False  # private in exact numerics only, else stacked, which changes bits
    name: ClassVar[str] = "own"
    mark: ClassVar[RowMark] = ""
    varies: ClassVar[bool] = False

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if not context.is_followed:
            raise Unfusable
        return self.form(value)

    def form(self, value: Any) -> Hashable:
        return per_call.form(value, self.unread)

    def covers(self, value: Any) -> bool:
        return True

    def _same(self, value: Any) -> Test:
        try:
            form = self.form(value)
        except Unfusable:
            raise NoTest from None
        return lambda argument: self.form(argument) == form

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        if self.if_exact and not context.is_exact:
            return torch.cat(list(values))
        return per_call.mapped(lambda parts: per_call.PerCall(parts, context.rows), values)

    def give_back(self, joined: Any, values: Sequence[Any], rows: Sequence[int]) -> None:
        per_call.give_back(joined, values, rows)

    def copy_of(self, value: Any) -> Any:
        return per_call.mapped(lambda tensors: tensors[0], [value])

    def describe(self, value: Any) -> tuple[str, str]:
        form = repr(self.form(value)).encode()
        return f"own {blake2b(form, digest_size=4).hexdigest()} {type(value).__name__}", ""


@dataclass(frozen=True, slots=True)
class Prefix(Rule):
    """Fuses by `rule` until its keys and values are cached; after that only its length is read."""

    rule: Rule
    name: ClassVar[str] = "prefix"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        is_read = context.arguments.get("kv_cache_mode") != "cached"
        return self.rule.key(value, context) if is_read else (value.dtype, value.shape[2:])

    def _same(self, value: Any) -> Test:
        return self.rule.same(value)

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        if context.arguments.get("kv_cache_mode") != "cached":
            return self.rule.join(values, context)
        return values[0][:1].expand(sum(context.rows), *values[0].shape[1:])
