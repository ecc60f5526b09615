"""Simulate the scheduler with each constant halved and doubled: docs/scheduling-constants.csv.

usage: make constants    (about ten minutes of one core; `--only NAME` selects some)

Each value is a ratio to the result with the constant's own value on the same requests, averaged
over `POINTS`: mean latency, its 99th percentile, and requests in time. All numbers of a tuple are
scaled together. With learned costs one changed decision affects all later ones: differences below
0.03 are noise.
"""

import argparse
import ast
import csv
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing import Pool
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import carpool.schedule
from carpool_lab.simulate.report import numbers
from carpool_lab.simulate.scenario import Model, mix, play
from carpool_lab.tables import TABLES, siblings
from carpool_lab.workload import Mix, Setting, bursts, generators, plan

DATA = Path(__file__).with_name("scheduling-constants.csv")
COLUMNS = ("constant", "value", "meaning", "mean/2", "p99/2", "in time/2", "mean*2", "p99*2",
           "in time*2")  # fmt: skip
COUNT = 200  # requests of a point
POINTS: Sequence[tuple[str, str, float, int | None]] = (  # table, mix, load, seed of learned costs
    ("flux-512", "steps", 0.9, None),
    ("qwen-512", "sizes", 0.9, None),
    ("sana-512", "dated", 0.9, None),
    ("qwen-512", "tenants", 0.9, 0),
    ("sana-512", "steps", 0.9, 0),
    ("flux-512", "steps", 2.0, 1),
    ("qwen-512-streamed", "steps", 0.9, 1),
)
NEVER_PLAYED = ("peers", "overload", "batch_modes")  # modules that act before the scheduler


@dataclass(frozen=True, slots=True)
class Constant:
    """A numeric constant, or a tuple, of a module in `carpool.schedule`."""

    module: str
    name: str
    value: Any
    meaning: str

    def scaled(self, factor: float) -> Any:
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        values = tuple(
            max(1, round(factor * v)) if isinstance(v, int) else factor * v for v in values
        )
        return values if isinstance(self.value, tuple) else values[0]


def constants() -> Iterator[Constant]:
    """All constants of the scheduler, with their comments or docstrings."""
    root = Path(carpool.schedule.__file__).parent
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        lines, body = text.splitlines(), ast.parse(text).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if not isinstance(target, ast.Name) or not target.id.isupper():
                continue
            try:
                value = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except ValueError:
                continue
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(number, int | float) for number in numbers):
                continue
            meaning = lines[node.lineno - 1].partition("  # ")[2]
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                meaning = " ".join(str(following.value.value).split())
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            yield Constant(module, target.id, value, meaning)


def modules() -> list[ModuleType]:
    prefixes = ("carpool.schedule.", "carpool.fleet.", "carpool_lab.simulate.")
    return [module for name, module in sys.modules.items() if name.startswith(prefixes)]


def figures(constant: Constant | None, value: Any) -> list[tuple[float, float, float]]:
    """Mean latency, p99 and share in time of each point. Runs in its own process."""
    if constant is not None:
        for module in modules():
            if getattr(module, constant.name, None) == constant.value:
                setattr(module, constant.name, value)
    results = []
    for table, name, load, learned in POINTS:
        model = Model(siblings(TABLES[table]))
        requests = _dated(model) if name == "dated" else mix(name, model.tables)
        arrivals_rng, rng = generators(7)
        times = bursts(load * model.capacity_qps(requests), arrivals_rng, size=1)
        arrivals = plan(times, requests, rng, count=COUNT)
        result = play(model, arrivals, "continuous", learned=learned)
        latency = numbers(result, 5.0).latency
        in_time = [ride.ended_s <= ride.waiting.deadline_s for ride in result.requests]
        results.append((latency.mean_s, latency.p99_s, statistics.fmean(in_time)))
    return results


def _dated(model: Model) -> Mix:
    """A mix where every third request has a deadline of 2 or 5 times its solo seconds."""
    settings = [Setting({"num_inference_steps": steps}, weight=2) for steps in (8, 20, 50)]
    for steps, times in product((8, 20, 50), (2.0, 5.0)):
        body: dict[str, Any] = {"num_inference_steps": steps}
        solo_s = sum(stage.call_s * stage.count for stage in model.stages(body))
        settings.append(Setting(body | {"deadline_s": times * solo_s}, weight=0.5))
    return Mix(settings)


def _ratios(
    points: Sequence[tuple[float, float, float]], base: Sequence[tuple[float, float, float]]
) -> list[str]:
    ratios = zip(
        *[[a / b for a, b in zip(*two, strict=True)] for two in zip(points, base, strict=True)],
        strict=True,
    )
    return [f"{statistics.fmean(column):.3f}" for column in ratios]


def _work(case: tuple[Constant | None, float]) -> list[tuple[float, float, float]]:
    constant, factor = case
    return figures(constant, constant and constant.scaled(factor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, help="default: number of cores")
    parser.add_argument("--only", nargs="*", help="names; nothing is written")
    arguments = parser.parse_args()
    selected = [c for c in constants() if not arguments.only or c.name in arguments.only]
    played = [c for c in selected if not c.module.startswith(NEVER_PLAYED)]
    cases = [(None, 1.0), *product(played, (0.5, 2.0))]
    rows = {}
    with Pool(arguments.processes, maxtasksperchild=1) as pool:
        results = pool.imap(_work, cases, chunksize=1)
        base = next(results)
        for constant in played:
            cells = [*_ratios(next(results), base), *_ratios(next(results), base)]
            rows[constant.name] = cells
            click.echo(f"{constant.name:<16} {constant.value!s:<14} {' '.join(cells)}")
    if arguments.only:
        return
    lines = [
        [c.name, str(c.value), c.meaning, *rows.get(c.name, ["not simulated", *[""] * 5])]
        for c in selected
    ]
    with DATA.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])


if __name__ == "__main__":
    main()
