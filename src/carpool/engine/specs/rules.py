"""The rules that the tables use: the meaning of an argument, and so how it fuses.

Each is a class or an object with all operations for an argument; see `rule.py`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from carpool.engine.digests import Unfusable, flag
from carpool.engine.nested import holds_tensors, mapped
from carpool.engine.specs.rule import (
    FLAG,
    CallArguments,
    First,
    JoinContext,
    KeyContext,
    Leaf,
    NoTest,
    RowMark,
    Rule,
    Test,
    anything,
    is_tensor_list,
    passes,
    same_tensor,
)

TIMES = ("timestep", "timesteps", "t", "sigma")  # one number for all rows of a call, or one a row


class Concat(Rule):
    name = word = "concat"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if isinstance(value, (list, tuple)):
            return type(value), tuple(self.key_part(entry, context) for entry in value)
        if not isinstance(value, Tensor) or not value.ndim:
            raise Unfusable
        return value.dtype, value.device, tuple(value.shape[1:])

    def resembles(self, name: str, value: Any, lead: Tensor) -> bool:
        """Whether an axis of the main input, such as its frames, is folded into the rows."""
        if is_tensor_list(value):
            return all(self.resembles(name, entry, lead) for entry in value)
        if not isinstance(value, Tensor) or value.ndim < 3 or not value.is_floating_point():
            return False
        times, rest = divmod(len(value), len(lead))
        return not rest and times in lead.shape[1:3]

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        if isinstance(values[0], (list, tuple)):
            return join_columns(values)
        return torch.cat(list(values))


class Columns(Rule):
    name = word = "stacks"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if not isinstance(value, (list, tuple, dict)):
            raise Unfusable
        entries = value.values() if isinstance(value, dict) else value
        names = tuple(value) if isinstance(value, dict) else type(value)
        return names, tuple(STACK.key(entry, context) for entry in entries)

    def covers(self, value: Any) -> bool:
        return not isinstance(value, Tensor)

    def resembles(self, name: str, value: Any, lead: Tensor) -> bool:
        return is_tensor_list(value) and all(STACK.resembles(name, v, lead) for v in value)

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


class Share(First):
    name = word = "share"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if isinstance(value, (list, tuple)) and value:
            return flag(value, context.digests.of)
        if not isinstance(value, Tensor):
            raise Unfusable
        return context.digests.of(value)

    def resembles(self, name: str, value: Any, lead: Tensor) -> bool:
        return holds_tensors(value)

    def _same(self, value: Any) -> Test:
        return same_tensor(value)

    def _shape(self, value: Tensor) -> Sequence[int]:
        return value.shape


class RowList(Rule):
    name = "list"
    word = "tensor"
    mark = "row"
    varies = False

    def key(self, value: Any, context: KeyContext) -> Hashable:
        kinds = [
            (e.dtype, e.device, e.ndim) if isinstance(e, Tensor) else f"{type(e)}" for e in value
        ]
        is_equal = len(value) == context.rows and len(set(kinds)) == 1
        if not (is_equal and isinstance(value[0], (Tensor, list, type(None)))):
            raise Unfusable
        return kinds[0]

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

    def resembles(self, name: str, value: Any, lead: Tensor) -> bool:
        return isinstance(value, Tensor) and not value.ndim and name in TIMES

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        pairs = zip(values, context.rows, strict=True)
        return torch.cat([_expanded(value, rows, context.device) for value, rows in pairs])


class Unused(First):
    name = "unused"

    def is_implied(self, name: str, value: Any, context: KeyContext) -> bool:
        return True

    def same(self, value: Any) -> Test:
        return anything


class Factor(First):
    name = "factor"

    def is_implied(self, name: str, value: Any, context: KeyContext) -> bool:
        # to the bit, a product of sums differs from a sum of products
        return type(value) in (int, float) and not context.is_exact

    def align(self, name: str, batch: CallArguments, defaults: Mapping[str, Any]) -> None:
        if name in defaults and any(name in arguments for arguments in batch):
            for arguments in batch:
                arguments.setdefault(name, defaults[name])

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return values[0] if _are_equal(values) else 1.0

    def divide(self, values: Sequence[Any], answers: list[Any]) -> list[Any]:
        if _are_equal(values):
            return answers
        return [
            mapped(answer, partial(torch.mul, other=value))
            for answer, value in zip(answers, values, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class State(Rule):
    """An object with internal state; the first call's is passed.

    `state_key` returns the part that must be equal, or None for state that belongs to one
    request. If the forward changes the state, `joined` combines the objects of several calls,
    and `copied` copies one for a trial forward.
    """

    state_key: Callable[[Any], Hashable | None]
    joined: Callable[[Any], Any] | None = None
    copied: Callable[[Any], Any] | None = None
    word: ClassVar[str] = "tensor"
    mark: ClassVar[RowMark] = ""
    varies: ClassVar[bool] = False

    def text(self) -> str:
        return "state"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if (state := self.state_key(value)) is None:
            raise Unfusable
        return state

    def _same(self, value: Any) -> Test:
        if (state := self.state_key(value)) is None:
            raise NoTest
        return lambda argument: self.state_key(argument) == state

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return values[0] if self.joined is None else self.joined(values)

    def copy_of(self, value: Any) -> Any:
        return value if self.copied is None else self.copied(value)


@dataclass(frozen=True, slots=True)
class Keyed(Rule):
    """Fuses by `rule` among calls with equal `part`: a forward applies one row's part to all."""

    rule: Rule
    part: Callable[[Any], Hashable]
    word: ClassVar[str] = "tensor"
    varies: ClassVar[bool] = False

    def text(self) -> str:
        return f"{self.rule.name} (of equal key)"

    @property
    def mark(self) -> RowMark:  # type: ignore[override]
        return self.rule.mark

    def key(self, value: Any, context: KeyContext) -> Hashable:
        return self.part(value), self.rule.key(value, context)

    def _same(self, value: Any) -> Test:
        return same_tensor(value)

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return self.rule.join(values, context)


@dataclass(frozen=True, slots=True)
class Entries(Rule):
    """A dict with a rule for each of its entries. Tables write it as a dict."""

    rules: Mapping[str, Rule]
    word: ClassVar[str] = "tensor"

    def text(self) -> str:
        return "(" + ", ".join(f"`{name}` {rule.text()}" for name, rule in self.rules.items()) + ")"

    def entry(self, name: Any) -> Rule:
        return self.rules.get(name, FLAG)

    def key(self, value: Any, context: KeyContext) -> Hashable:
        if not isinstance(value, Mapping):
            return STACK.key(value, context)
        entries = [(name, self.entry(name).key_part(value[name], context)) for name in value]
        return tuple(sorted(entries, key=itemgetter(0)))

    def covers(self, value: Any) -> bool:
        if not isinstance(value, Mapping):
            return True
        return all(self.entry(name).covers(entry) for name, entry in value.items())

    def _same(self, value: Any) -> Test:
        if not isinstance(value, dict):
            raise NoTest
        tests = {name: self.entry(name).same(entry) for name, entry in value.items()}
        return lambda argument: (
            type(argument) is dict
            and argument.keys() == tests.keys()
            and all(passes(test, argument[name]) for name, test in tests.items())
        )

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        if not isinstance(values[0], Mapping):
            return STACK.join(values, context)
        return {n: self.entry(n).fuse([v[n] for v in values], context) for n in values[0]}

    def leaves(self, name: str, value: Any, values: Sequence[Any]) -> Iterator[Leaf]:
        if isinstance(value, Mapping):
            for entry, rule in self.rules.items():
                yield from rule.leaves(entry, value.get(entry), [v.get(entry) for v in values])


STACK, STACKS, CONCAT, SHARE = Rule(), Columns(), Concat(), Share()
LIST, SCALAR, UNUSED, LAYERS, FACTOR = RowList(), Scalar(), Unused(), ByLayer(), Factor()

ArgumentRule = Rule | Mapping[str, "ArgumentRule"]


def as_rule(rule: ArgumentRule) -> Rule:
    """A rule as written in tables, where a dict stands for `Entries`."""
    if isinstance(rule, Rule):
        return rule
    return Entries({name: as_rule(entry) for name, entry in rule.items()})


def join_columns(values: Sequence[Any]) -> Any:
    """Lists or tuples of tensors, joined place by place."""
    columns = zip(*values, strict=True)
    return type(values[0])(c[0] if c[0] is None else torch.cat(c) for c in columns)


def _expanded(value: Any, rows: int, device: torch.device) -> Tensor:
    """One number for each row: a single number is repeated, a vector stays as it is."""
    if isinstance(value, Tensor) and value.ndim == 1 and value.device == device:
        return value  # common case
    number: Tensor = torch.as_tensor(value, device=device)
    return number.reshape(1).expand(rows) if number.ndim == 0 else number


def _are_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


@dataclass(frozen=True, slots=True)
class Spec:
    """How calls of one method fuse."""

    rows: str = ""  # argument whose axis 0 (or length) counts a call's rows; "": the first of rules
    rules: Mapping[str, ArgumentRule] = field(default_factory=dict)
    adds: Mapping[str, Any] = field(default_factory=dict)  # extra kwargs: they skip unread output
    returns_list: bool = False  # lists in the output hold one entry a row, not one a layer
    needs: tuple[str, ...] = ()  # without these arguments a call reads those marked UNUSED
    unread: tuple[str, ...] = ()  # output fields without rows, which no pipeline reads
    is_inferred: bool = False  # guessed from shapes: see `infer.py`
    casts: bool = False  # float inputs are cast to the module's own dtype first
    peak: int = 0  # decoders: peak values alive per latent position of a row; 0: unknown
    # wraps a forward of several calls: (module, their arguments, their rows)
    within: Callable[..., AbstractContextManager[object]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.rows or next(iter(self.rules)))
        object.__setattr__(self, "rules", {n: as_rule(rule) for n, rule in self.rules.items()})

    @classmethod
    def of(cls, axis: str = "", /, **rules: ArgumentRule) -> "Spec":
        return cls(axis, rules)

    def rule(self, name: str) -> Rule:
        """The rule of an argument; `FLAG` where the table has none."""
        return self.rules.get(name, FLAG)  # type: ignore[return-value]  # made by `__post_init__`
