"""A rule of the tables: a class with all operations that the engine needs for an argument.

Those are its part of the fuse key (`key`), a quick test of a later argument (`same`), the join of
several calls' arguments (`join`), the division of their answers (`divide`), its name in evidence
(`describe`), its mark for the exact mode (`mark`), and matching arguments (`resembles`).
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from carpool.engine.digests import Digests, Unfusable, flag
from carpool.engine.nested import holds_tensors

PLAIN = (bool, int, float, str, type(None))

TensorForm = tuple[torch.Size, torch.dtype, torch.device]
SameTensor = tuple[weakref.ref[Tensor], int]
Test = TensorForm | SameTensor | tuple[Any] | Callable[[Any], bool]
"""A quick test whether an argument fuses like an earlier one: by form, identity, value, or code."""
RowMark = Literal["rows", "row", ""]
CallArguments = Sequence[dict[str, Any]]  # the arguments of each call
Leaf = tuple["Rule", str, Any, Sequence[Any]]  # see `Rule.leaves`


class NoTest(Exception):
    """There is no cheap test for a change of such an argument."""


def passes(test: Test, value: Any) -> bool:
    """Whether a value passes a test."""
    if not isinstance(test, tuple):
        return test(value)
    if len(test) == 1:
        return type(value) is type(test[0]) and bool(value == test[0])
    if not isinstance(value, Tensor):
        return False
    if len(test) == 2:  # the same tensor, unchanged
        return test[0]() is value and value._version == test[1]
    return (value.shape, value.dtype, value.device) == test


def anything(argument: Any) -> bool:
    return True


def same_tensor(value: Any) -> Test:
    if not isinstance(value, Tensor) or value.is_inference():
        raise NoTest  # it has no version counter: a change would go unseen
    return weakref.ref(value), value._version


@dataclass(frozen=True, slots=True)
class KeyContext:
    """The call of an argument, and the tools to make its key."""

    rows: int
    arguments: Mapping[str, Any]
    digests: Digests
    is_exact: bool  # lengths are not padded
    is_followed: bool  # torch functions run one by one here, not compiled or elsewhere


@dataclass(frozen=True, slots=True)
class JoinContext:
    """The rows of each call, and what else decides how their arguments are joined."""

    rows: Sequence[int]
    device: torch.device
    arguments: Mapping[str, Any]  # arguments of the first call
    is_exact: bool


class Rule:
    """A rule; the default is for a tensor with one entry a row on axis 0."""

    name: ClassVar[str] = "stack"
    word: ClassVar[str] = "stack"  # its tensors in evidence texts
    mark: ClassVar[RowMark] = "rows"  # a joined tensor holds all rows; a list, one tensor a row
    varies: ClassVar[bool] = True  # its content varies between calls

    def key(self, value: Any, context: KeyContext) -> Hashable:
        """The fuse-key part of an argument that is not None: all properties that must be equal.

        Raises:
            Unfusable, AttributeError, TypeError: the rule does not cover such a value.
        """
        if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != context.rows:
            raise Unfusable
        return value.dtype, value.device, tuple(value.shape[1:])

    def is_implied(self, name: str, value: Any, context: KeyContext) -> bool:
        """Whether a call with this argument may share a forward with calls that lack or vary it."""
        return False

    def key_part(self, value: Any, context: KeyContext) -> Hashable:
        """As `key`, also for None."""
        return None if value is None else self.key(value, context)

    def text(self) -> str:
        """The name of the rule in a list of tables."""
        return self.name

    def covers(self, value: Any) -> bool:
        """Whether the rule defines the meaning of each tensor of an argument."""
        return not (isinstance(value, Mapping) and holds_tensors(value))

    def resembles(self, name: str, value: Any, lead: Tensor) -> bool:
        """Whether an argument matches this rule, judged against the main input of its call."""
        return isinstance(value, Tensor) and bool(value.ndim) and len(value) == len(lead)

    def same(self, value: Any) -> Test:
        """A test whether another value gives the same fuse-key part as this one.

        Raises:
            NoTest: there is no quick test.
        """
        if isinstance(value, PLAIN):
            return (value,)
        if type(value) is dict and not value:
            return ({},)  # not the argument itself, which may change
        return self._same(value)

    def _same(self, value: Any) -> Test:
        if not isinstance(value, Tensor):
            raise NoTest
        return value.shape, value.dtype, value.device

    def align(self, name: str, batch: CallArguments, defaults: Mapping[str, Any]) -> None:
        """Before the join: add arguments that some calls of a forward lack and others have."""

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        """Join the arguments of several calls into one; none is None."""
        return torch.cat(list(values))

    def fuse(self, values: Sequence[Any], context: JoinContext) -> Any:
        """As `join`, also for None, and for a single call."""
        first = values[0]
        return first if first is None or len(values) == 1 else self.join(values, context)

    def give_back(self, joined: Any, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Copy a forward's writes in a joined argument back to the argument of each call."""

    def divide(self, values: Sequence[Any], answers: list[Any]) -> list[Any]:
        """Adjust the answers to each call's own argument, as if the call had run alone."""
        return answers

    def copy_of(self, value: Any) -> Any:
        """The argument for a trial forward, which may modify it."""
        return value

    def entry(self, name: Any) -> "Rule":
        """The rule of an entry of a dict."""
        return FLAG

    def leaves(self, name: str, value: Any, values: Sequence[Any]) -> Iterator[Leaf]:
        """The rules, names, joined values and values by call of an argument's leaf entries."""
        yield self, name, value, values

    def describe(self, value: Any) -> tuple[str, str]:
        """The type and the size of an argument, as texts: the key of its evidence."""
        if isinstance(value, Tensor):
            shape = self._shape(value) if value.ndim else value.shape
            dtype = str(value.dtype).removeprefix("torch.")
            return f"{self.word} {dtype} {value.ndim}d", "x".join(map(str, shape))
        if isinstance(value, Mapping):
            entries = {n: self.entry(n).describe(value[n]) for n in sorted(value, key=str)}
            texts = ", ".join(f"{name}={text}" for name, (text, _) in entries.items())
            sizes = [f"{name}:{size}" for name, (_, size) in entries.items() if size]
            return f"{{{texts}}}", " ".join(sizes)
        if isinstance(value, (list, tuple)) and holds_tensors(value):
            described = [self.describe(entry) for entry in value]
            return f"{len(value)} of {described[0][0]}", " ".join(size for _, size in described)
        return repr(value)[:200], ""

    def _shape(self, value: Tensor) -> Sequence[int]:
        return value.shape[1:]


class First(Rule):
    """A rule that passes the argument of the first call."""

    word = "tensor"
    mark = ""
    varies = False

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        return values[0]


class Flag(First):
    """A plain value, equal in all calls of a forward: the rule of arguments without a rule."""

    name = "flag"

    def key(self, value: Any, context: KeyContext) -> Hashable:
        return flag(value)

    def covers(self, value: Any) -> bool:
        return not holds_tensors(value)

    def _same(self, value: Any) -> Test:
        if (part := _flag(value)) is None:
            raise NoTest
        return lambda argument: _flag(argument) == part


FLAG = Flag()


def _flag(value: Any) -> Hashable | None:
    try:
        return flag(value)
    except Unfusable:
        return None


def is_tensor_list(value: Any) -> bool:
    """Whether a value is a non-empty list or tuple of tensors."""
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return is_list and all(isinstance(entry, Tensor) for entry in value)
