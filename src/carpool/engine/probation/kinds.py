"""Kinds of calls, and the evidence that each fuses: forwards that agreed with lone calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from carpool.engine.intercept import Call

QUORUM = 3  # agreeing forwards after which a kind is trusted


@dataclass(frozen=True, slots=True)
class Kind:
    """The flags and types that calls with common evidence share."""

    text: str  # class, method, flags, types: the key of the evidence
    sizes: str
    module: int
    stacked: tuple[str, ...]  # arguments whose content may differ between calls


def kind_of(call: Call, *, is_exact: bool) -> Kind:
    target, arguments = call.target, call.arguments()
    spec = target.spec
    assert spec is not None
    parts, sizes, stacked = [], [], []
    for name, value in sorted(arguments.items()):
        rule = spec.rule(name)
        if value is None:
            continue
        text, size = rule.describe(value)
        parts.append(f"{name}={text}")
        if size:
            sizes.append(f"{name}:{size}")
        if rule.varies:
            stacked.append(name)
    extra = [
        *(["lora"] if call.lora else []),
        *(["exact"] if is_exact else []),
        *(["training"] if target.module.training else []),
    ]
    name = f"{type(target.module).__name__}.{target.method}"
    return Kind(
        f"{name}({', '.join([*parts, *extra])})",
        " ".join(sizes),
        id(target.module),
        tuple(stacked) if spec.is_inferred else (),
    )


def width(rows: Sequence[int]) -> str:
    return "+".join(map(str, sorted(rows)))


class Evidence(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The evidence that one kind of call fuses."""

    agreed: Annotated[int, Meta(ge=0)] = 0
    unsettled: int = 0
    sizes: set[str] = set()
    widths: set[str] = set()
    varied: set[str] = set()  # arguments that differed in agreeing forwards
    shared: set[str] = set()  # arguments that the next guess shares
    alone: str | None = None  # why it always runs alone

    @property
    def status(self) -> tuple[str, str]:
        """How a kind of call fuses, and why."""
        if self.alone is not None:
            return "alone", self.alone
        if self.agreed < QUORUM:
            return "probation", f"{self.agreed} of {QUORUM} forwards agreed"
        return "proven", f"{self.agreed} forwards agreed"
