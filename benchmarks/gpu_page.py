"""The page of what `gpu.py` found.

Its records lie beside it, written one by one, so that a run that is killed leaves what it measured,
and the page of several runs is that of all their records.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu_report import (
    Curve,
    Kernels,
    Likeness,
    Machine,
    Missing,
    Record,
    Run,
    parsed,
    written,
)


class Report:
    """Records as they come, in a file, and the page made of them.

    Args:
        page: where the page is to be; the records are beside it, as .jsonl. None: only printed.
    """

    def __init__(self, page: Path | None) -> None:
        self._page = page
        self.records: list[Record] = []
        if page is not None and self._lines.exists():
            self.records = [parsed(line) for line in self._lines.read_text().splitlines()]

    @property
    def _lines(self) -> Path:
        assert self._page is not None
        return self._page.with_suffix(".jsonl")

    def add(self, record: Record) -> None:
        print(written(record), flush=True)
        self.records.append(record)
        if self._page is not None:
            with self._lines.open("a") as lines:
                lines.write(written(record) + "\n")
            self._page.write_text(page(self.records))


def page(records: Sequence[Record]) -> str:
    """All records as tables; of two of the same part, the later one."""
    latest = _latest(records)
    parts = [
        "# Benchmarks on a GPU",
        "Made by `benchmarks/gpu.py`: published configs, random bf16 weights, embeddings for"
        " prompts.\nWhat the columns mean is said there and in `benchmarks/gpu_engine.py`.",
        *_machines(records),
    ]
    for title, make in SECTIONS.items():
        if rows := [row for record in latest for row in make(record)]:
            parts.append(f"## {title}\n\n{_table(rows)}")
    return "\n\n".join(parts) + "\n"


def _latest(records: Sequence[Record]) -> list[Record]:
    """One record of a part; that it was missing once counts only while nothing was measured."""
    found: dict[tuple[str, str], Record] = {}
    for record in records:
        if not isinstance(record, Machine):
            place = record.model, record.part
            if not (isinstance(record, Missing) and place in found):
                found[place] = record
    return list(found.values())


def _machines(records: Sequence[Record]) -> Iterator[str]:
    found: dict[str, list[Machine]] = {}
    for one in records:
        if isinstance(one, Machine):
            found.setdefault(f"{one.device}, {one.versions}", []).append(one)
    for name, runs in found.items():
        least, most = min(one.tflops for one in runs), max(one.tflops for one in runs)
        commands = dict.fromkeys(f"    {one.command}" for one in runs)
        yield f"Machine: {name}; a large matrix product reached {least:.3g} to {most:.3g} TFLOP/s."
        yield "\n".join(commands)


def _table(rows: Sequence[dict[str, str]]) -> str:
    head = list(dict.fromkeys(name for row in rows for name in row))
    lines = [head, ["---"] * len(head), *([row.get(name, "") for name in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _curve(one: Record) -> Iterator[dict[str, str]]:
    if isinstance(one, Curve):
        yield {
            "model": one.model,
            "size": one.size,
            "TFLOP a row": f"{one.tflop:.3g}",
            **{f"{rows} ms": f"{seconds * 1e3:.4g}" for rows, seconds in one.points},
            "knee": str(one.knee),
            "rows/s at the knee, of 1": f"{_gain(one):.2f}",
            "of the ceiling at 1": f"{one.ceiling(one.points[0][0]):.0%}",
            "at the knee": f"{one.ceiling(one.knee):.0%}",
            "peak GiB": f"{one.peak_gib:.1f}",
        }


def _gain(one: Curve) -> float:
    seconds = dict(one.points)
    return one.knee * seconds[one.points[0][0]] / seconds[one.knee]


def _run(one: Record) -> Iterator[dict[str, str]]:
    if isinstance(one, Run):
        yield {
            "model": one.model,
            "size": one.size,
            "code": one.code,
            "mode": f"`{one.mode}`",
            "requests x steps": f"{one.requests} x {one.steps}",
            "requests/s": f"{one.per_s:.3g}",
            "p50 s": f"{one.p50_s:.3g}",
            "p99 s": f"{one.p99_s:.3g}",
            "forwards": str(one.forwards),
            "rows": f"{one.rows:.1f}",
            "loop us": f"{one.loop_us:.0f}",
            "pipeline us": f"{one.fiber_us:.0f}",
            "in forwards": f"{one.in_forwards:.1%}",
            "late": f"{one.late:.0%}",
            "waited": f"{one.waited:.2%}",
            "peak GiB": f"{one.peak_gib:.1f}",
            "warm-up s": f"{one.warm_up_s:.0f}",
        }


def _kernels(one: Record) -> Iterator[dict[str, str]]:
    if isinstance(one, Kernels):
        share = f"{one.share:.1%}"
        yield {"model": one.model, "size": one.size, "code": one.code, "kernels ran": share}


def _likeness(one: Record) -> Iterator[dict[str, str]]:
    if isinstance(one, Likeness):
        yield {
            "model": one.model,
            "size": one.size,
            "requests": str(one.requests),
            "worst dB": _db(one.worst_db),
            "median dB": _db(one.median_db),
            "two different ones dB": _db(one.others_db),
        }


def _db(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "equal"


def _missing(one: Record) -> Iterator[dict[str, str]]:
    if isinstance(one, Missing):
        yield {"model": one.model, "part": one.part, "why": one.why.replace("|", "/")}


SECTIONS = {
    "Seconds by rows": _curve,
    "Through the engine": _run,
    "Kernels, within a stretch of `continuous`": _kernels,
    "Fused against alone": _likeness,
    "Not measured": _missing,
}
