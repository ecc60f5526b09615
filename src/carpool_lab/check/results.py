"""Timings of a check: a curve for each component, its knee, a table for the simulator.

The *knee* is the widest worthwhile forward: see `carpool_lab.tables.knee`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from carpool.schedule.cost import Costs
from carpool.schedule.views import CallKind
from carpool.types import Phase
from carpool_lab.tables import Table, knee


@dataclass(frozen=True, slots=True)
class ComponentTiming:
    """One kind of forward."""

    kind: CallKind
    phase: Phase
    rows: int  # rows of one request
    calls: float  # calls of one request
    seconds: Mapping[int, float]  # medians by rows
    peak_bytes: Mapping[int, int]  # by rows, with weights; empty if the device reports none
    too_wide: int | None = None  # rows that did not fit the memory

    def knee(self, min_gain: float) -> int:
        return knee(self.seconds, min_gain)


@dataclass(frozen=True, slots=True)
class TimingReport:
    """The seconds of one model at one size, with device and versions."""

    model: str  # as given by the user
    device: str
    dtype: str
    versions: Mapping[str, str]
    usual_steps: int
    min_gain: float
    repeats: int
    size: tuple[int, int] | None  # width and height in pixels; None: the model has no sizes
    steps: int  # measured steps of each request
    components: tuple[ComponentTiming, ...]  # in order of use
    costs: Costs
    problem: str = ""  # why wider forwards were not measured

    @property
    def size_name(self) -> str:
        return "default" if self.size is None else "{}x{}".format(*self.size)

    @property
    def denoisers(self) -> list[ComponentTiming]:
        return [part for part in self.components if part.phase == "denoise"]

    def request_s(self, phase: Phase) -> dict[int, float]:
        """Seconds of a phase by number of requests in it, for fully measured numbers."""
        parts = [part for part in self.components if part.phase == phase]
        shared = [
            {rows // part.rows for rows in part.seconds if rows % part.rows == 0} for part in parts
        ]
        return {
            n: sum(part.calls * part.seconds[n * part.rows] for part in parts)
            for n in sorted(set.intersection(*shared) if shared else ())
        }

    def step_s(self) -> dict[int, float]:
        """Seconds of a denoising step by number of requests in it."""
        return {n: seconds / self.steps for n, seconds in self.request_s("denoise").items()}

    @property
    def knee(self) -> int:
        """Largest worthwhile number of requests in a step."""
        rows = max((part.rows for part in self.denoisers), default=1)
        seconds = self.step_s()
        return knee(seconds, self.min_gain * rows) if seconds else 1

    def as_json(self) -> dict[str, Any]:
        """The results as JSON; `carpool simulate` reads `tables` and `costs`."""
        components = [
            {"name": str(part.kind), **to_builtins(part), "knee": part.knee(self.min_gain)}
            for part in self.components
        ]
        size = {
            "size": self.size_name,
            "steps": self.steps,
            "knee": self.knee,
            "problem": self.problem or None,
            "components": components,
        }
        return {
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "versions": dict(self.versions),
            "min_gain": self.min_gain,
            "repeats": self.repeats,
            "sizes": [size],
            "tables": [to_builtins(self._table())] if 1 in self.step_s() else [],
            "costs": self.costs.to_json(),
        }

    def _table(self) -> Table:
        last = re.split(r"[/\\]", self.model.rstrip("/\\"))[-1]
        model = re.sub(r"[^\w.]", "_", last).strip(".") or "model"
        sides = set(self.size or ())
        side = str(*sides) if len(sides) == 1 else self.size_name
        return Table(
            name=f"{model}-{side}",  # format that `Table.model` and `side_px` parse
            steps=self.usual_steps,
            denoise_s=self.step_s(),
            encode_s=self.request_s("encode").get(1, 0.0),
            decode_s=self.request_s("decode").get(1, 0.0),
        )
