"""The words that the tables are written in: what an argument means, and so how it fuses.

A word is a class, which says all that there is to say of an argument: its part of the fuse key
(`key`), a quick test of a later argument (`same`), how those of several calls are joined (`join`),
and what the exact mode is told of the joined one (`mark`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from carpool.engine.digests import Digests, Unfusable, flag, name_of
from carpool.engine.specs.argument_tests import (
    PLAIN,
    NoTest,
    Test,
    anything,
    passes,
    same_tensor,
    same_value,
)
from carpool.engine.stacks import Stacks, expand, join_columns


@dataclass(frozen=True, slots=True)
class KeyContext:
    """The call of an argument, and what its key is made with."""

    rows: int
    arguments: Mapping[str, Any]
    digests: Digests
    is_exact: bool  # lengths are not padded


@dataclass(frozen=True, slots=True)
class JoinContext:
    """The rows of each call, and what their arguments are joined with."""

    rows: Sequence[int]
    device: torch.device
    stacks: Stacks


class Rule:
    """A word; this one is for a tensor with one entry a row on axis 0."""

    name: ClassVar[str] = "stack"
    word: ClassVar[str] = "stack"  # of its tensors, in the text of evidence
    mark: ClassVar[Literal["rows", "row", ""]] = "rows"  # a joined one holds all rows, or lists one
    varies: ClassVar[bool] = True  # in its content, from call to call

    def key(self, value: Any, context: KeyContext) -> Hashable:
        """The part of the fuse key of an argument that is not None: all that must be equal.

        Raises:
            Unfusable, AttributeError, TypeError: the rule does not cover such a value.
        """
        if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != context.rows:
            raise Unfusable
        return value.dtype, value.device, tuple(value.shape[1:])

    def is_implied(self, name: str, value: Any, context: KeyContext) -> bool:
        """Whether calls that leave this argument out, or pass another, may share its forward."""
        return False

    def text(self) -> str:
        """The rule in a list of tables."""
        return self.name

    def same(self, value: Any) -> Test:
        """Whether another value gives the same part of a fuse key as this one.

        Raises:
            NoTest: that cannot be told quickly.
        """
        if isinstance(value, PLAIN):
            return same_value((type(value), value))
        return self._same(value)

    def _same(self, value: Any) -> Test:
        if not isinstance(value, Tensor):
            raise NoTest
        return value.shape, value.dtype, value.device

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        """One argument of those of several calls, none of which is None."""
        return context.stacks.join(values)


class Concat(Rule):
    name = word = "concat"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if isinstance(value, (list, tuple)):
            return type(value), tuple(key_of(self, entry, context) for entry in value)
        if not isinstance(value, Tensor) or not value.ndim:
            raise Unfusable
        return value.dtype, value.device, tuple(value.shape[1:])

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        if isinstance(values[0], (list, tuple)):
            return join_columns(values)
        return context.stacks.join(values)


class Columns(Rule):
    name = word = "stacks"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if not isinstance(value, (list, tuple, dict)):
            raise Unfusable
        entries = value.values() if isinstance(value, dict) else value
        names = tuple(value) if isinstance(value, dict) else type(value)
        return names, tuple(STACK.key(entry, context) for entry in entries)

    def _same(self, value: Any) -> Test:
        if isinstance(value, Tensor) or not isinstance(value, (list, tuple)):
            raise NoTest
        cls, tests = type(value), [STACK.same(entry) for entry in value]
        if not all(isinstance(entry, Tensor) for entry in value):
            raise NoTest
        return lambda argument: (
            type(argument) is cls
            and len(argument) == len(tests)
            and all(map(passes, tests, argument))
        )

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        if isinstance(first := values[0], dict):
            return {name: torch.cat([value[name] for value in values]) for name in first}
        return join_columns(values)


class ByLayer(Rule):
    name = "layers"
    word = "tensor"
    varies = False

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if value.ndim < 2 or value.shape[1] != context.rows:
            raise Unfusable
        return value.dtype, value.device, (value.shape[0], *value.shape[2:])

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return [torch.cat(layers) for layers in zip(*values, strict=True)]


class Share(Rule):
    name = word = "share"
    mark = ""
    varies = False

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if isinstance(value, (list, tuple)) and value:
            return context.digests.nested(value)
        if not isinstance(value, Tensor):
            raise Unfusable
        return context.digests.of(value)

    def _same(self, value: Any) -> Test:
        return same_tensor(value)

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return values[0]


class RowList(Rule):
    name = "list"
    word = "tensor"
    mark = "row"
    varies = False

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if len(value) != context.rows or not all(isinstance(entry, Tensor) for entry in value):
            raise Unfusable
        return value[0].dtype, value[0].device, value[0].ndim

    def _same(self, value: Any) -> Test:
        raise NoTest

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return [entry for value in values for entry in value]


class Scalar(Rule):
    name = word = "scalar"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if not isinstance(value, Tensor):
            return str(type(value))
        return super().key(value, context) if value.ndim else (value.dtype, value.device)

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        pairs = zip(values, context.rows, strict=True)
        return torch.cat([expand(value, rows, context.device) for value, rows in pairs])


class Unused(Rule):
    name = "unused"
    word = "tensor"
    mark = ""
    varies = False

    def is_implied(self, name: str, value: Any, context: KeyContext) -> bool:
        return True

    def same(self, value: Any) -> Test:
        return anything

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return values[0]


class Factor(Unused):
    name = "factor"

    def is_implied(self, name: str, value: Any, context: KeyContext) -> bool:
        # a product of sums is not to the bit the sum of products
        return type(value) in (int, float) and not context.is_exact

    def same(self, value: Any) -> Test:
        return Rule.same(self, value)


@dataclass(frozen=True, slots=True)
class Pad(Rule):
    """Stack, with zeros after the shorter ones along `axis`, where calls bring a mask.

    The mask, (rows, length) with zeros for what is to be ignored, has this rule too, or STACK
    where it holds lengths instead. Calls that bring no mask only fuse with calls of their own
    length, unless one may be made for them.
    """

    mask: str  # name of the mask argument
    axis: int = 1
    cut: tuple[str, ...] = ()  # fields of the output that carry the axis (as axis 1): cut back
    makes_mask: bool = False  # where lengths differ, a missing mask becomes ones, int64
    places: bool = False  # packed mask: must be equal in exact numerics
    word: ClassVar[str] = "tensor"

    def text(self) -> str:
        return f"pad (with `{self.mask}`)"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        STACK.key(value, context)
        dtype, device, shape = value.dtype, value.device, value.shape[1:]
        if self.places and context.is_exact:
            return context.digests.of(value)
        arguments, lengths = context.arguments, [*shape]
        if self.makes_mask or arguments.get(self.mask) is not None:
            is_tuple = arguments.get("return_dict") is False  # has no names to cut back by
            can_pad = not (self.cut and is_tuple) and not context.is_exact
            if can_pad and self.axis and shape[self.axis - 1]:
                lengths[self.axis - 1] = -1  # 0 stays: all of its padding would be hidden
        return dtype, device, tuple(lengths)

    def is_implied(self, name: str, value: Any, context: KeyContext) -> bool:
        if not self.makes_mask or self.mask != name or value is None:
            return False
        rows = value.shape[:-1] == (context.rows,)
        return rows and value.dtype in (torch.int64, torch.bool) and not context.is_exact

    def _same(self, value: Any) -> Test:
        if self.places and isinstance(value, Tensor):
            return same_tensor(value)
        return STACK.same(value)

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        length = max(value.shape[self.axis] for value in values)
        after = [0, 0] * (values[0].ndim - 1 - self.axis)  # `pad` counts axes from the last
        return torch.cat(
            [pad(value, [*after, 0, length - value.shape[self.axis]]) for value in values]
        )


@dataclass(frozen=True, slots=True)
class State(Rule):
    """An object with a state of its own, of which the first call's is passed.

    `state_key` gives the part that must be equal, or None for a state that belongs to one request.
    A state that the forward changes says how the objects of several calls are passed
    (`joined`), and how one is copied for a forward that answers nobody (`copied`).
    """

    state_key: Callable[[Any], Hashable | None]
    joined: Callable[[Any], Any] | None = None
    copied: Callable[[Any], Any] | None = None
    word: ClassVar[str] = "tensor"
    mark: ClassVar[Literal["rows", "row", ""]] = ""
    varies: ClassVar[bool] = False

    def text(self) -> str:
        return "state"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if (state := self.state_key(value)) is None:
            raise Unfusable
        return state

    def _same(self, value: Any) -> Test:
        raise NoTest

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return values[0] if self.joined is None else self.joined(values)


@dataclass(frozen=True, slots=True)
class Keyed(Rule):
    """Fuses by `rule` with calls whose `part` is equal: a forward reads it of some rows for all."""

    rule: Rule
    part: Callable[[Any], Hashable]
    word: ClassVar[str] = "tensor"
    varies: ClassVar[bool] = False

    def text(self) -> str:
        return f"{self.rule.name} (of equal key)"

    @property
    def mark(self) -> Literal["rows", "row", ""]:  # type: ignore[override]
        return self.rule.mark

    def key(self, value: Any, context: KeyContext) -> Hashable:
        return self.part(value), self.rule.key(value, context)

    def _same(self, value: Any) -> Test:
        return same_tensor(value)

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return self.rule.join(values, context)


STACK, STACKS, CONCAT, SHARE = Rule(), Columns(), Concat(), Share()
LIST, SCALAR, UNUSED, LAYERS, FACTOR = RowList(), Scalar(), Unused(), ByLayer(), Factor()

ArgumentRule = Rule | Mapping[str, "ArgumentRule"]


def key_of(rule: ArgumentRule | None, value: Any, context: KeyContext) -> Hashable:
    """The part of the fuse key of an argument, by its rule; see `Rule.key`."""
    if value is None:
        return None
    if rule is None:
        return flag(value)
    if isinstance(rule, Rule):
        return rule.key(value, context)
    if not isinstance(value, Mapping):
        return STACK.key(value, context)
    entries = [(name, key_of(rule.get(name), value[name], context)) for name in value]
    return tuple(sorted(entries, key=name_of))


def test_of(rule: ArgumentRule | None, value: Any) -> Test:
    """A test of later values of an argument, by its rule; see `Rule.same`."""
    if isinstance(rule, Rule) and not (isinstance(value, dict) and not value):
        return rule.same(value)
    if isinstance(value, PLAIN):
        return same_value((type(value), value))
    if not isinstance(value, dict) or (value and rule is None):
        raise NoTest
    rules = rule if isinstance(rule, Mapping) else {}
    tests = {name: test_of(rules.get(name), entry) for name, entry in value.items()}
    return lambda argument: (
        type(argument) is dict
        and argument.keys() == tests.keys()
        and all(passes(test, argument[name]) for name, test in tests.items())
    )


def joined(rule: ArgumentRule | None, values: Sequence[Any], context: JoinContext) -> Any:
    """One argument of those of several calls, by its rule; see `Rule.join`."""
    first = values[0]
    if first is None or rule is None or len(values) == 1:
        return first
    if isinstance(rule, Rule):
        return rule.join(values, context)
    return {n: joined(rule.get(n), [value[n] for value in values], context) for n in first}


@dataclass(frozen=True, slots=True)
class Spec:
    """How calls of one method fuse."""

    rows: str  # the argument whose axis 0 (or length) counts the rows of a call
    rules: Mapping[str, ArgumentRule]
    adds: Mapping[str, Any] = field(
        default_factory=dict
    )  # extra keyword arguments of every call: they skip unread output
    returns_list: bool = False  # lists in the output hold one entry a row, not one a layer
    needs: tuple[str, ...] = ()  # arguments without which a call reads what its rules call UNUSED
    unread: tuple[str, ...] = ()  # fields of the output without rows, which no pipeline reads
    is_inferred: bool = False  # guessed from shapes: see `infer.py`
    casts: bool = False  # float inputs are cast to the module's own dtype first
    peak: int = 0  # decoders: values alive at once per latent position of a row; 0: unknown
