"""Evidence of how a kind of call fuses: forwards that agreed with its calls run alone or not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

QUORUM = 3  # agreeing forwards after which a kind is trusted


@dataclass(slots=True)
class Evidence:
    """The evidence of how one kind of call fuses."""

    agreed: int = 0
    unsettled: int = 0
    sizes: set[str] = field(default_factory=set)
    widths: set[str] = field(default_factory=set)
    varied: set[str] = field(default_factory=set)  # arguments that differed where bits agreed
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
    """The status of a kind of call by its evidence (`Evidence.to_json`), and the reason."""
    if "alone" in data:
        return "alone", str(data["alone"])
    agreed = int(data["agreed"])
    if agreed < QUORUM:
        return "probation", f"{agreed} of {QUORUM} forwards agreed"
    return "proven", f"{agreed} forwards agreed"
