"""Evidence of how a kind of call fuses: what agreed with its calls run alone, and what did not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NEEDED = 3  # forwards of a kind that must agree


@dataclass(slots=True)
class Evidence:
    """The evidence of how one kind of call fuses."""

    agreed: int = 0
    unsettled: int = 0
    sizes: set[str] = field(default_factory=set)
    widths: set[str] = field(default_factory=set)
    varied: set[str] = field(default_factory=set)  # arguments that differed where bits agreed
    shared: set[str] = field(default_factory=set)  # what the next guess shares: this one is wrong
    alone: str | None = None  # why it runs alone, for good

    def to_json(self) -> dict[str, Any]:
        if self.alone is not None:
            return {"alone": self.alone}
        names = ("sizes", "widths", "varied", "shared")
        return {"agreed": self.agreed} | {name: sorted(getattr(self, name)) for name in names}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Evidence":
        if "alone" in data:
            return cls(alone=str(data["alone"]))
        known = cls(agreed=int(data["agreed"]))
        for name in ("sizes", "widths", "varied", "shared"):
            setattr(known, name, set(map(str, data[name])))
        return known


def fate(data: Mapping[str, Any]) -> tuple[str, str]:
    """How a kind of call fuses by its evidence (`Evidence.to_json`), and why."""
    if "alone" in data:
        return "alone", str(data["alone"])
    agreed = int(data["agreed"])
    if agreed < NEEDED:
        return "probation", f"{agreed} of {NEEDED} forwards agreed"
    return "proven", f"{agreed} forwards agreed"
