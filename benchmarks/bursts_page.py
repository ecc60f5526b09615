"""Rows of the closed bursts (`bursts.py`): comparison of the modes by rounds, and their page.

A ratio is the median of the ratios of single rounds, because consecutive bursts run at the same
speed of the machine. Its standard error is that of a median, by the median absolute deviation.

Source: Rousseeuw & Croux, Alternatives to the Median Absolute Deviation, Journal of the American
Statistical Association 88, 1993.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from pathlib import Path
from typing import NamedTuple

from benchmarks.process import machine

OTHER_MODES = ("off", "dynamic", "request")
LEAST_THROUGHPUT = 0.97  # promise, relative to the best other mode
MOST_LATENCY = 1.05
CERTAIN = 2.0  # standard errors
PHASE_S = 10.0  # phases of a busy neighbour
WRONG = 4.0  # error factor at one width of each kind of a table
MARKS = ("<!-- bursts -->", "<!-- /bursts -->")  # marks in the page
NORMAL = 1.4826  # standard deviation over median absolute deviation (normal)


class Played(NamedTuple):
    """A burst."""

    per_s: float  # requests
    mean_s: float  # latency
    cpu_s: float  # CPU seconds of the process
    forwards: float  # forwards of all modules


@dataclass(frozen=True, slots=True)
class Row:
    """A part with one of the two tables, against the best other mode."""

    part: str
    table: str  # fresh or wrong
    best: str  # the other mode with the highest throughput
    per_s: float  # requests, median of the rounds
    throughput: float  # relative to the best other mode
    latency: float  # mean, relative to the best other mode
    rounds: int
    cpu: float = 0.0  # CPU seconds, relative to the best other; 0: not measured
    forwards: float = 0.0  # forwards of a burst, all modules
    others: float = 0.0  # forwards of the best other mode
    throughput_error: float = 0.0
    latency_error: float = 0.0

    @property
    def is_kept(self) -> bool:
        return self.throughput >= LEAST_THROUGHPUT and self.latency <= MOST_LATENCY

    @property
    def is_decided(self) -> bool:
        """Return whether more rounds would hardly change `is_kept`."""
        ahead = self.throughput - LEAST_THROUGHPUT, MOST_LATENCY - self.latency
        errors = CERTAIN * self.throughput_error, CERTAIN * self.latency_error
        missed, is_inside = (
            [sign * by > error for by, error in zip(ahead, errors, strict=True)] for sign in (-1, 1)
        )
        return any(missed) or all(is_inside)


def rows(part: str, rounds: Mapping[str, Sequence[Played]]) -> list[Row]:
    """Medians of the rounds, against the best other mode.

    Args:
        rounds: the bursts of each party, by round.
    """

    def median(party: str, of: Callable[[Played], float]) -> float:
        return statistics.median(map(of, rounds[party]))

    leader = max(OTHER_MODES, key=lambda party: median(party, lambda p: p.per_s))
    quickest = min(OTHER_MODES, key=lambda party: median(party, lambda p: p.mean_s))
    table = []
    for party in rounds:
        if party in OTHER_MODES:
            continue
        throughput, throughput_error = _ratio(rounds[party], rounds[leader], lambda p: p.per_s)
        latency, latency_error = _ratio(rounds[party], rounds[quickest], lambda p: p.mean_s)
        cpu, _ = _ratio(rounds[party], rounds[leader], lambda p: p.cpu_s)
        table.append(
            Row(
                part,
                "wrong" if "wrong" in party else "fresh",
                leader,
                median(party, lambda p: p.per_s),
                throughput,
                latency,
                len(rounds[party]),
                cpu,
                median(party, lambda p: p.forwards),
                median(leader, lambda p: p.forwards),
                throughput_error,
                latency_error,
            )
        )
    return table


def _ratio(
    runs: Sequence[Played], baseline: Sequence[Played], of: Callable[[Played], float]
) -> tuple[float, float]:
    """The median of the rounds' ratios, and its standard error."""
    ratios = [of(run) / of(reference) for run, reference in zip(runs, baseline, strict=True)]
    middle = statistics.median(ratios)
    deviation = NORMAL * statistics.median(abs(ratio - middle) for ratio in ratios)
    return middle, sqrt(pi / 2) * deviation / sqrt(len(ratios))


def page(table: Sequence[Row], clients: int, *, is_quick: bool = False) -> str:
    """The section of docs/benchmarks.md."""
    command = "python -m benchmarks.bursts" + " --quick" * is_quick
    within = sum(row.is_kept for row in table)
    low, high = min(row.rounds for row in table), max(row.rounds for row in table)
    text = f"""Made by `{command}`. Machine: {machine()}; torch with one thread,
one heap for all threads.
Bursts of {clients} simultaneous requests; all modes in random order; {low} to {high} rounds,
until the promise is decided by {CERTAIN:g} standard errors. The first burst of each engine is not
counted. *Busy*: a neighbour takes a core for {PHASE_S:g} of every {2 * PHASE_S:g} seconds.
*Fresh*: empty cost table; *wrong*: one width of each kind is {WRONG:g} times off. Ratios are
medians within a round, with standard errors. *Throughput* is relative to the best other mode
(`off`, `dynamic` and `request` with 8), *mean latency* to the lowest; *CPU*: CPU time of a burst
relative to the best other mode, the least disturbed by neighbours; *forwards*: forwards of a
burst, of all modules, and in brackets those of the best other mode. The promise, a throughput of
at least {LEAST_THROUGHPUT:g} and a mean latency of at most {MOST_LATENCY:g}, holds in {within} of
{len(table)} rows."""
    lines = [
        MARKS[0],
        "## Live: closed bursts, costs learned on the way",
        "",
        text,
        "",
        "| model, mix, machine | table | rounds | requests/s | best other | throughput "
        "| mean latency | CPU | forwards | |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [
        f"| {row.part} | {row.table} | {row.rounds} | {row.per_s:.2f} | {row.best} "
        f"| {row.throughput:.3f} ± {row.throughput_error:.3f} "
        f"| {row.latency:.3f} ± {row.latency_error:.3f} | {row.cpu:.2f} "
        f"| {row.forwards:g} ({row.others:g}) | {'' if row.is_kept else 'missed'} |"
        for row in table
    ]
    return "\n".join([*lines, MARKS[1]])


def put(text: str, path: Path) -> None:
    """Put the section into a page: replace the old section, or append it."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    begin, end = (old.find(mark) for mark in MARKS)
    if begin >= 0 and end > begin:
        new = old[:begin] + text + old[end + len(MARKS[1]) :]
    else:
        new = f"{old.rstrip()}\n\n{text}\n".lstrip()
    path.write_text(new, encoding="utf-8")
