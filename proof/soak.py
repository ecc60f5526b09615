"""Use a server for half an hour and check its growth: memory, open files, threads.

usage: make soak     (or: python -m proof.soak [--minutes 30] [--workers N]
                      [--write])
       make soak-fleet  (with --workers 3, of two models; requests have priorities, some deadlines)

The same four kinds of clients as in `chaos`, without faults. Data retained for clients, the store's
cache and the allocators' pools must be full before the comparison, so the first half does not
count. Synchronous requests have no Idempotency-Key, because their answers would be stored for an
hour.
"""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2

from proof.clients import Clients
from proof.diary import Diary, Findings, findings
from proof.house import MODELS, House, fleet_of, now_s, open_house
from proof.page import conclude, machine, parser_of, table
from proof.tickets import EXACT, Ticket, tickets

CLIENTS = {"waits": 2, "streams": 1, "polls": 2, "vanishes": 1}
TICKETS = 24
SAMPLES = 180  # total number: every 10 s of half an hour
CROWD = 64  # simultaneous requests at the start, to start all threads
WARM = 1 / 2  # fraction of the time for warm-up
WINDOW = 1 / 6  # fraction of the time: a window after warm-up, and the last one
OPEN_FILES = "open files"
FLAT = 0.02  # most relative growth


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a process."""

    process: str
    at_s: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Growth:
    """A measure of a process in two windows."""

    process: str
    measure: str
    early: float
    late: float

    @property
    def share(self) -> float:
        return self.late / self.early - 1 if self.early else 0.0


def look(process: str, pid: int, at_s: float) -> Sample:
    """Sample a process now.

    Raises:
        OSError: no such process.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}

    def mib(*names: str) -> float:
        return sum(int(fields[name][0]) for name in names if name in fields) / 1024

    values = {
        "resident memory (MiB)": mib("VmRSS"),
        "its own memory (MiB)": mib("RssAnon", "VmSwap"),
        OPEN_FILES: float(len(os.listdir(f"/proc/{pid}/fd"))),
        "threads": float(fields["Threads"][0]),
    }
    return Sample(process, at_s, values)


def growths(samples: Sequence[Sample], seconds: float) -> list[Growth]:
    """Compare the medians of the window after the warm-up and of the last window.

    For open files the minimum counts: connections vary, but a leaked file stays.

    Args:
        seconds: total duration.
    """
    growths_found = []
    for process in dict.fromkeys(sample.process for sample in samples):
        samples_here = [sample for sample in samples if sample.process == process]
        early = [sample for sample in samples_here if WARM <= sample.at_s / seconds < WARM + WINDOW]
        late = [sample for sample in samples_here if sample.at_s / seconds >= 1 - WINDOW]
        for measure in samples_here[0].values:
            of = min if measure == OPEN_FILES else statistics.median
            values = (of(s.values[measure] for s in w) for w in (early, late))
            growths_found.append(Growth(process, measure, *values))
    return growths_found


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a run."""

    minutes: float
    growths: list[Growth]
    diary: Diary
    tickets: list[Ticket]
    workers: int = 1

    @property
    def findings(self) -> Findings:
        return findings(self.diary, self.tickets)

    def problems(self) -> list[str]:
        """Broken promises."""
        growths = [
            f"{growth.process}: {growth.measure} grew by {growth.share:.1%}"
            for growth in self.growths
            if growth.share > FLAT
        ]
        failed = [ending.failure for ending in self.diary.endings if ending.failure]
        return growths + failed + ([] if self.findings.are_none else [str(self.findings)])


async def run(minutes: float, seed: int, workers: int = 1) -> Run:
    """Use a server for `minutes`.

    Args:
        workers: total workers of two models; 1: one model.
    """
    diary, samples, seconds = Diary(), list[Sample](), 60 * minutes
    with tempfile.TemporaryDirectory(prefix="carpool-proof-") as name:
        flags: tuple[str, ...] = (*EXACT, "--state-dir", str(Path(name) / "state"))
        model = "shapes"
        if workers > 1:
            flags, model = (*flags, *fleet_of(Path(name), workers)), ""
        house = House(Path(name), flags, model)
        async with (
            httpx2.AsyncClient(base_url=house.url, timeout=None, trust_env=False) as http,
            open_house(house, http, workers),
        ):
            requests = await tickets(http, TICKETS, seed, MODELS if workers > 1 else ())
            await asyncio.gather(*(http.get("/v1/jobs") for _ in range(CROWD)))
            clients = Clients(http, requests, diary, has_keys=False)
            began_s = now_s()
            async with asyncio.TaskGroup() as group:
                for kind, count in CLIENTS.items():
                    for number in range(count):
                        group.create_task(clients.run(kind, number, seed))
                while (at_s := now_s() - began_s) < seconds:
                    pids = {"front": house.front}
                    for number, pid in enumerate(house.workers(), 1):
                        pids[f"worker {number}" if workers > 1 else "worker"] = pid
                    with suppress(OSError):  # a process died: the clients report it
                        samples += [look(name, pid, at_s) for name, pid in pids.items()]
                    await asyncio.sleep(seconds / SAMPLES)
                clients.is_over = True
            await clients.last_look()
    return Run(minutes, growths(samples, seconds), diary, requests, workers)


def page(run: Run) -> str:
    """The section of the page."""
    rows = [
        [f"{growth.process}: {growth.measure}", f"{growth.early:.1f}", f"{growth.late:.1f}",
         f"{growth.share:+.1%}"]
        for growth in run.growths
    ]  # fmt: skip
    failed = sum(bool(ending.failure) for ending in run.diary.endings)
    early, late = WARM * run.minutes, (1 - WINDOW) * run.minutes
    window = WINDOW * run.minutes
    flags = f" --workers {run.workers}" if run.workers > 1 else ""
    return f"""Made by `python -m proof.soak --minutes {run.minutes:g}{flags}`.
Machine: {machine()}.

{len(run.diary.endings)} requests of {sum(CLIENTS.values())} clients, {run.diary.gone} of clients
that disconnected; failed: **{failed}**. Medians over {window:.3g} minutes (open files: the \
minimum). The limit of growth is {FLAT:.0%}.

{table(["measure", f"from minute {early:.3g}", f"from minute {late:.3g}", "grown"], rows)}

*Its own memory* counts anonymous pages, in memory or swapped out.
"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="3: of two models")
    options = parser.parse_args()
    result = asyncio.run(run(options.minutes, options.seed, options.workers))
    section = "soak-fleet" if options.workers > 1 else "soak"
    return conclude(page(result), result.problems(), section if options.write else None)


if __name__ == "__main__":
    raise SystemExit(main())
