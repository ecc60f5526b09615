"""Kinds of calls, and the evidence that each fuses: forwards that agreed with lone calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(slots=True)
class Evidence:
    """The evidence that one kind of call fuses."""

    agreed: int = 0
    unsettled: int = 0
    sizes: set[str] = field(default_factory=set)
    widths: set[str] = field(default_factory=set)
    varied: set[str] = field(default_factory=set)  # arguments that differed in agreeing forwards
    shared: set[str] = field(default_factory=set)  # arguments that the next guess shares
    alone: str | None = None  # why it always runs alone

    def to_json(self) -> dict[str, Any]:
        if self.alone is not None:
            return {"alone": self.alone}
        names = ("sizes", "widths", "varied", "shared")
        return {"agreed": self.agreed} | {name: sorted(getattr(self, name)) for name in names}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Evidence":
        if "alone" in data:
            return cls(alone=str(data["alone"]))
        evidence = cls(agreed=int(data["agreed"]))
        for name in ("sizes", "widths", "varied", "shared"):
            setattr(evidence, name, set(map(str, data[name])))
        return evidence


def status(data: Mapping[str, Any]) -> tuple[str, str]:
    """The status of a kind of call, and the reason, from its evidence (`Evidence.to_json`)."""
    if "alone" in data:
        return "alone", str(data["alone"])
    agreed = int(data["agreed"])
    if agreed < QUORUM:
        return "probation", f"{agreed} of {QUORUM} forwards agreed"
    return "proven", f"{agreed} forwards agreed"
