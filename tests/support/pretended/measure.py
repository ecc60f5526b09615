"""Whole requests on the pretended device: right, nothing in the wrong place, and what waits.

Two requests share every step. What makes the host wait between their second and fourth step is
what every step costs; all else is paid once a request.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from carpool.models.grid import families
from support.engine_driver import called, driving, for_inference, fresh, gap
from support.matrix import CASES
from support.matrix.case import Case
from support.pretended.device import NAME
from support.pretended.order import Order
from support.pretended.report import REPORT, Site
from support.tiny import ARGUMENTS

FIELDS = ("images", "frames", "audio", "audios")
STAGES = "pyramid_num_inference_steps_list"  # Helios's word for steps
NOT_YET = (  # of fewer steps than `measure` takes, or in stages that it does not follow
    *("helios-mid-t2v", "helios-distilled-t2v", "hunyuan3d-2"),
    *("fastwan21-t2v", "turbowan21-t2v", "turbowan22-i2v-a14b"),
)
FIRST = tuple(
    name
    for name in dict.fromkeys(family.cases[0] for family in families() if family.cases)
    if name not in NOT_YET
)
"""A row of the matrix for each family: those of the table in `docs/devices.md`."""
SEEDS = (1, 2)
FROM, TO, STEPS = 2, 4, 6  # steps
OWNERS = ("carpool", "scheduler", "pipeline", "model")


@dataclass(frozen=True, slots=True)
class Waits:
    """How often the host waits for the device because of one request."""

    per_step: Mapping[Site, float]
    in_all: Mapping[Site, float]  # of a request of `STEPS` steps
    widest: int  # requests in one forward of a denoiser

    def by_owner(self, sites: Mapping[Site, float]) -> list[float]:
        return [sum(n for s, n in sites.items() if s.owner == owner) for owner in OWNERS]


def measure(name: str) -> Waits:
    """Run two requests of a row of the matrix.

    Raises:
        AssertionError: they do not get what they get on a CPU, or something was in the wrong place.
    """
    [case] = [one for one in CASES if one.name == name]
    arguments = [_arguments(case, seed) for seed in SEEDS]
    pipe: Any = fresh(case.family)
    pipe = for_inference(case.adapt(pipe) if case.adapt else pipe)
    alone = [called(pipe, **one) for one in arguments]
    with REPORT.off():
        pipe.to(NAME)
    settings: dict[str, Any] = {
        "isolation": "shared",
        "device": NAME,
        "dtype": "float32",
    }  # its own code aside
    with driving(pipe, max_running=16, **settings) as drive:
        heard = [drive.submit(**one) for one in arguments]
        REPORT.clear()
        at: list[Counter[Site]] = []
        for step in (FROM, TO):
            drive.turn_until(lambda: all(one.events and one.step >= step for one in heard))  # noqa: B023
            at.append(REPORT.syncs.copy())
        drive.finish()
        total = REPORT.syncs.copy()
        widest = max(f.requests for f in drive.forwards if f.phase == "denoise")
    for recorder, expected in zip(heard, alone, strict=True):
        assert recorder.error is None, recorder.error
        for field in FIELDS:
            if field in expected:
                assert _gap(recorder.outcome.fields[field], expected[field]) <= case.tolerance
    assert not Order.races, Order.races
    assert not REPORT.mismatches, REPORT.mismatches
    steps = {s: (at[1][s] - at[0][s]) / (TO - FROM) / len(SEEDS) for s in at[1]}
    in_all = {site: n / len(SEEDS) for site, n in total.items()}
    return Waits({site: n for site, n in steps.items() if n}, in_all, widest)


def _arguments(case: Case, seed: int) -> dict[str, Any]:
    family = {n: v for n, v in ARGUMENTS[case.family].items() if n not in case.without}
    first = {**family, **case.common, **case.requests[0], "seed": seed}
    if STAGES not in first:
        first["num_inference_steps"] = STEPS
    return first


def _gap(left: Any, right: Any) -> float:
    if isinstance(left, list):
        left, right = torch.stack(left), torch.stack(right)
    return gap(left, right)


def row(name: str, waits: Waits) -> str:
    """A row of the table in `docs/devices.md`."""
    cells = [_number(n) for n in waits.by_owner(waits.per_step)]
    sites = sorted((s for s in waits.per_step if s.owner != "carpool"), key=lambda s: s.where)
    where = "<br>".join(f"{s.kind}: `{s.where}` {_number(waits.per_step[s])}" for s in sites)
    in_all = [_number(n) for n in waits.by_owner(waits.in_all)]
    return f"| {name} | {' | '.join(cells)} | {' | '.join(in_all)} | {where or '-'} |"


def _number(value: float) -> str:
    return f"{round(value, 2):g}"
