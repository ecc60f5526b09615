"""The results of `carpool tune`: curves, their knees, batching caps, tables for the simulator.

The *knee* is the widest forward that pays: compared with the next narrower one that pays, each
additional row raises the rows a second by more than `min_gain`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from msgspec import to_builtins

from carpool.errors import InvalidValue
from carpool.schedule.cost import Costs
from carpool.schedule.views import CallKind
from carpool.settings.peers.sglang_rules import Resolution
from carpool.types import Phase
from carpool_lab.tables import Table


@dataclass(frozen=True, slots=True)
class ComponentResult:
    """One kind of forward at one size."""

    kind: CallKind
    phase: Phase
    rows: int  # that a request adds
    calls: float  # of a request
    seconds: Mapping[int, float]  # by rows, which never makes them less; as policies will see them
    peak_bytes: Mapping[int, int]  # by rows, weights included; empty where the device tells none
    too_wide: int | None = None  # rows that did not fit the memory
    sd: Mapping[int, float] = field(default_factory=dict)  # of `seconds`: how uncertain they are
    tries: Mapping[int, int] = field(default_factory=dict)  # runs that they come from, by rows

    @property
    def gains(self) -> dict[int, float]:
        """Rows a second by rows, in parts of those at the width before, less one."""
        return {
            width: width / self.seconds[width] * self.seconds[before] / before - 1
            for before, width in pairwise(sorted(self.seconds))
        }

    def knee(self, min_gain: float) -> int:
        return knee(self.seconds, min_gain)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """A model at one size."""

    resolution: Resolution | None  # None: the model does not say
    steps: int  # that were measured for each request
    cost: float  # of a request, as `admission.cost` counts
    components: tuple[ComponentResult, ...]  # in the order in which a request needs them
    problem: str = ""  # what kept more from being measured

    @property
    def name(self) -> str:
        return by(self.resolution)

    def request_s(self, phase: Phase) -> dict[int, float]:
        """Seconds of a phase by the number of requests that share it, where all was measured."""
        parts = [one for one in self.components if one.phase == phase]
        shared = [
            {rows // one.rows for rows in one.seconds if rows % one.rows == 0} for one in parts
        ]
        return {
            n: sum(one.calls * one.seconds[n * one.rows] for one in parts)
            for n in sorted(set.intersection(*shared) if shared else ())
        }

    def step_s(self) -> dict[int, float]:
        """Seconds of a denoising step by the number of requests that share it."""
        return {n: seconds / self.steps for n, seconds in self.request_s("denoise").items()}

    def most(self, min_gain: float) -> int:
        """Requests up to which a shared step is worth it: its knee."""
        rows = max((one.rows for one in self.components if one.phase == "denoise"), default=1)
        seconds = self.step_s()
        return knee(seconds, min_gain * rows) if seconds else 1


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The results of one model at several sizes, with device and versions."""

    model: str  # as it was asked for
    device: str
    dtype: str
    versions: Mapping[str, str]
    usual_steps: int
    min_gain: float
    repeats: int
    sizes: tuple[SizeResult, ...]
    costs: Costs
    speed_factor: float = 1.0  # seconds as a multiple of the table's of before, 1 without one

    @property
    def name(self) -> str:
        """The model's last name, fit for a file."""
        last = re.split(r"[/\\]", self.model.rstrip("/\\"))[-1]
        return re.sub(r"[^\w.-]", "_", last).strip(".") or "model"

    def as_json(self) -> dict[str, Any]:
        """The results as JSON; `carpool simulate` reads `tables` and `costs`."""
        return {
            **self._provenance(),
            "model": self.model,
            "sizes": [
                {
                    "size": one.name,
                    "steps": one.steps,
                    "knee": one.most(self.min_gain),
                    "problem": one.problem or None,
                    "components": [
                        {
                            "name": str(part.kind),
                            **to_builtins(part),
                            "knee": part.knee(self.min_gain),
                        }
                        for part in one.components
                    ],
                }
                for one in self.sizes
            ],
            "tables": [self._table(one) for one in self.sizes if 1 in one.step_s()],
            "costs": self.costs.to_json(),
            "speed_factor": self.speed_factor,
        }

    def batching_config(self) -> dict[str, Any]:
        """Rules for `--batching-config`: the knee of every size, and a cost for all others.

        That cost is the largest that a batch of a measured size may have: a larger size, which was
        not measured, is batched less, in proportion to its pixels and frames.
        """
        known = [one for one in self.sizes if one.resolution is not None]
        rules: list[dict[str, Any]] = [
            {
                "model": self.model,
                "resolution": one.name,
                "max_batch_size": one.most(self.min_gain),
                "calibration": self._calibration(one),
            }
            for one in known
        ]
        everybody: dict[str, Any] = {
            "model": self.model,
            "max_batch_size": max(one.most(self.min_gain) for one in self.sizes),
        }
        if costs := [one.most(self.min_gain) * one.cost for one in known]:
            everybody["max_cost"] = max(costs)
        sources = {"sizes": [one.name for one in self.sizes]}
        everybody["calibration"] = {**self._provenance(), **sources}
        return {"schema_version": 1, "rules": [*rules, everybody]}

    def _provenance(self) -> dict[str, Any]:
        return {
            "by": "carpool tune",
            "device": self.device,
            "dtype": self.dtype,
            "versions": dict(self.versions),
            "min_gain": self.min_gain,
            "repeats": self.repeats,
        }

    def _calibration(self, size: SizeResult) -> dict[str, Any]:
        denoisers = [one for one in size.components if one.phase == "denoise"]
        peaks: dict[int, int] = {}  # by requests
        for one in denoisers:
            for rows, peak in one.peak_bytes.items():
                peaks[rows // one.rows] = max(peak, peaks.get(rows // one.rows, 0))
        too_wide = [one.too_wide // one.rows for one in denoisers if one.too_wide]
        return {
            **self._provenance(),
            "step_s": {str(n): seconds for n, seconds in size.step_s().items()},
            "peak_bytes": {str(n): peak for n, peak in sorted(peaks.items())} or None,
            "did_not_fit": min(too_wide, default=None),
            "problem": size.problem or None,
        }

    def _table(self, size: SizeResult) -> dict[str, Any]:
        sides = set(size.resolution or ())
        side = str(*sides) if len(sides) == 1 else size.name
        table = Table(
            name=f"{self.name.replace('-', '_')}-{side}",  # as `Table.model` and `side_px` read it
            steps=self.usual_steps,
            denoise_s=size.step_s(),
            encode_s=size.request_s("encode").get(1, 0.0),
            decode_s=size.request_s("decode").get(1, 0.0),
        )
        fields: dict[str, Any] = to_builtins(table)
        return fields


def tables(data: Any) -> list[Table]:
    """The simulator's tables of a model that was tuned, one for each size.

    Args:
        data: of `Tuned.as_json`.

    Raises:
        InvalidValue: it is something else, or nothing could be measured.
    """
    try:
        found = [
            Table(**{**one, "denoise_s": {int(n): float(s) for n, s in one["denoise_s"].items()}})
            for one in data["tables"]
        ]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise InvalidValue(f"is not what `carpool tune` writes: {error!r}") from None
    if not found:
        raise InvalidValue("has no table: not even one request could be run")
    return found


def knee(seconds: Mapping[int, float], min_gain: float) -> int:
    """The widest that pays. One that does not is passed over: a wider one still may.

    Args:
        seconds: of a forward, by rows; at least one.
        min_gain: rows a second that a row more has to bring, in parts of those without it.
    """
    widths = sorted(seconds)
    best = widths[0]
    for width in widths[1:]:
        if width / seconds[width] * seconds[best] / best - 1 > min_gain * (width - best):
            best = width
    return best


def by(resolution: Resolution | None) -> str:
    """WIDTHxHEIGHT, or a word for the size of a model without sizes."""
    return "default" if resolution is None else f"{resolution[0]}x{resolution[1]}"
