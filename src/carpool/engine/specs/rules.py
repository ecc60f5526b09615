"""The words that the tables are written in: what an argument means, and so how it fuses."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class RuleKind(Enum):
    STACK = "stack"
    STACKS = "stacks"
    CONCAT = "concat"
    SHARE = "share"
    LIST = "list"
    SCALAR = "scalar"
    UNUSED = "unused"
    LAYERS = "layers"
    FACTOR = "factor"


STACK, STACKS, CONCAT, SHARE, LIST, SCALAR, UNUSED, LAYERS, FACTOR = RuleKind


@dataclass(frozen=True, slots=True)
class Pad:
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


@dataclass(frozen=True, slots=True)
class State:
    """An object with a state of its own, of which the first call's is passed.

    `key` gives the part that must be equal, or None for a state that belongs to one request. A
    state that the forward changes says how the objects of several calls are passed (`join`), and
    how one is copied for a forward that answers nobody (`copied`).
    """

    key: Callable[[Any], Hashable | None]
    join: Callable[[Any], Any] | None = None
    copied: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Keyed:
    """Fuses by `rule` with calls whose `key` is equal: a forward reads it of some rows for all."""

    rule: RuleKind
    key: Callable[[Any], Hashable]


ArgumentRule = RuleKind | Pad | State | Keyed | Mapping[str, "ArgumentRule"]


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
