"""Break a real server at random moments while four kinds of clients use it, and look for harm.

usage: make chaos     (or: PYTHONPATH=tests python -m proof.chaos [--minutes 10] [--seed 1]
                       [--faults N] [--write])

The moments and the order of the faults follow from the seed; each kind comes equally often. All
the while every 500th forward runs out of memory.
"""

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from proof.clients import Clients
from proof.diary import Diary, Findings, findings
from proof.disk import Disk, disk
from proof.house import RESTART_S, START_LIMIT_S, House, now_s, open_house, start_of
from proof.page import machine, table, write_section
from proof.tickets import EXACT, Ticket, tickets

CLIENTS = {"waits": 3, "streams": 2, "polls": 3, "vanishes": 2}
TICKETS = 24
WORKER_TIMEOUT_S = 5.0
READY_AGAIN_S = 5.0  # the promise: plus the time that loading takes
FULL_S = 4.0  # how long the disk is full
CALM_S = (2.0, 10.0)  # between readiness and the next fault
LOADING_S = (0.2, 3.0)  # after the start of a worker: when it is killed as it loads
STAMPEDE = 40  # clients that vanish at once
OUT_OF_MEMORY = 0.002  # of the forwards
FAULT = f"forward:memory:{OUT_OF_MEMORY:g}"
FLAGS = ("--worker-timeout", f"{WORKER_TIMEOUT_S:g}")


@dataclass(frozen=True, slots=True)
class Struck:
    """One fault, and how long the server was away."""

    what: str
    away_s: float  # from the fault until it was ready again
    loading_s: float  # of that: from the start of the new worker's process

    @property
    def beyond_s(self) -> float:
        return self.away_s - self.loading_s


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it all."""

    minutes: float
    seed: int
    struck: list[Struck]
    diary: Diary
    tickets: list[Ticket]
    left_over: list[str]  # what the server still holds in the end
    disk: str

    @property
    def findings(self) -> Findings:
        return findings(self.diary, self.tickets)


@dataclass(slots=True)
class Chaos:
    """Breaks one house."""

    house: House
    disk: Disk
    clients: Clients
    http: httpx2.AsyncClient
    rng: random.Random
    buried: set[int] = field(default_factory=set)  # workers that were killed or stopped

    @property
    def faults(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Every way to break it, by what the table calls it."""
        return {
            "worker killed": self._kill_worker,
            "worker killed, the next as it loads": self._kill_two_workers,
            "front killed": self._kill_front,
            "both killed": self._kill_both,
            "worker stopped": self._stop_worker,
            f"disk full for {FULL_S:g} s": self._fill_disk,
            f"{STAMPEDE} clients vanish": self._stampede,
        }

    async def strike(self, what: str) -> Struck:
        """Break it, wait until it is ready again."""
        fault_s = now_s()
        if "killed" in what or "stopped" in what:
            await self.faults[what]()
            began_s = await self._new_worker()
            ready_s = await self.house.ready(self.http)
            return Struck(what, ready_s - fault_s, ready_s - began_s)
        fault, was_away = asyncio.ensure_future(self.faults[what]()), False
        while not fault.done():
            was_away |= not await self.house.is_ready(self.http)
            await asyncio.sleep(0.05)
        await fault
        ready_s = await self.house.ready(self.http)
        return Struck(what, ready_s - fault_s if was_away else 0.0, 0.0)

    async def _new_worker(self) -> float:
        """When the process of the successor began.

        Raises:
            RuntimeError: there is none.
        """
        deadline_s = now_s() + START_LIMIT_S
        while now_s() < deadline_s:
            if new := [pid for pid in self.house.workers() if pid not in self.buried]:
                return start_of(new[-1])
            await asyncio.sleep(0.02)
        raise RuntimeError(f"no new worker after {START_LIMIT_S:g} s:\n{self.house.last_words()}")

    async def _kill_worker(self) -> None:
        self.buried.update(self.house.workers())
        self.house.signal_worker(signal.SIGKILL)

    async def _kill_two_workers(self) -> None:
        await self._kill_worker()
        await self._new_worker()
        await asyncio.sleep(self.rng.uniform(*LOADING_S))
        await self._kill_worker()

    async def _stop_worker(self) -> None:
        self.buried.update(self.house.workers())
        self.house.signal_worker(signal.SIGSTOP)

    async def _kill_front(self) -> None:
        self.buried.update(self.house.workers())
        self.house.kill_front()
        await asyncio.sleep(RESTART_S)
        self.house.start()

    async def _kill_both(self) -> None:
        self.house.signal_worker(signal.SIGKILL)
        await self._kill_front()

    async def _fill_disk(self) -> None:
        self.disk.fill()
        await asyncio.sleep(FULL_S)
        self.disk.free()

    async def _stampede(self) -> None:
        tickets = self.rng.choices(self.clients.tickets, k=STAMPEDE)
        await asyncio.gather(*(self.clients.vanish(one, self.rng) for one in tickets))


def order(faults: list[str], rng: random.Random) -> Iterator[str]:
    """Faults without end: all of them in every round, in another order each."""
    while True:
        yield from rng.sample(faults, len(faults))


async def run(minutes: float, seed: int, most: int | None = None) -> Run:
    """Break a server for so long, or so often.

    Raises:
        RuntimeError: it does not start, or does not come back.
    """
    rng, diary = random.Random(seed), Diary()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
    with tempfile.TemporaryDirectory(prefix="carpool-proof-") as name:
        folder = Path(name)
        house = House(folder, (*FLAGS, *EXACT, "--state-dir", str(folder / "state")), fault=FAULT)
        async with httpx2.AsyncClient(
            base_url=house.url, timeout=None, limits=limits, trust_env=False
        ) as http:
            with disk(folder / "state", lambda: house.front) as volume:
                async with open_house(house, http):
                    asked = await tickets(http, TICKETS, seed)
                    clients = Clients(http, asked, diary)
                    chaos, struck = Chaos(house, volume, clients, http, rng), list[Struck]()
                    kinds = order(list(chaos.faults), rng)
                    end_s = now_s() + 60 * minutes
                    async with asyncio.TaskGroup() as group:
                        for kind, count in CLIENTS.items():
                            for number in range(count):
                                group.create_task(clients.run(kind, number, seed))
                        while now_s() < end_s and (most is None or len(struck) < most):
                            await asyncio.sleep(rng.uniform(*CALM_S))
                            struck.append(await chaos.strike(next(kinds)))
                            print(f"{struck[-1].what}: away {struck[-1].away_s:.1f} s",
                                  file=sys.stderr)  # fmt: skip
                        clients.is_over = True
                    left_over = await _left_over(house, http)
                    await clients.last_look()
            kind_of_disk = "a tmpfs" if volume.is_mounted else "a limit on file sizes"
    return Run(minutes, seed, struck, diary, asked, left_over, kind_of_disk)


async def _left_over(house: House, http: httpx2.AsyncClient) -> list[str]:
    """What is still there although nobody asks any more: processes, requests."""
    for _ in range(100):
        stats = (await http.get("/stats")).json()
        held = {name: stats[name] for name in ("running", "waiting") if stats.get(name)}
        extra = len(house.processes()) - 2
        if not held and not extra:
            return []
        await asyncio.sleep(0.1)
    return [f"{extra} processes", *(f"{name}: {count}" for name, count in held.items())]


def page(run: Run) -> str:
    """The section of the page."""
    found, why = run.findings, Counter[str]()
    for (_, reason), count in run.diary.again.items():
        why[reason] += count
    reasons = ", ".join(f"{count} {reason}" for reason, count in why.most_common())
    return f"""Made by `PYTHONPATH=tests python -m proof.chaos --minutes {run.minutes:g} \
--seed {run.seed}`.
Machine: {machine()}. The disk is {run.disk}.

Lost: **{len(found.lost)}**. Duplicated: **{len(found.duplicated)}**. Foreign pictures: \
**{found.foreign}**; other than drawn alone: **{found.spoiled}**. Left over in the server: \
**{len(run.left_over)}**.

{_endings(run)}

{run.diary.gone} clients hung up. The others asked again because of: {reasons or "nothing"}.

{_faults(run)}

All the while every {round(1 / OUT_OF_MEMORY)}th forward runs out of memory.

*Away* is from the fault to the next `/health` 200, *loading* from the start of the new worker's
process. A stopped worker is taken for dead after {WORKER_TIMEOUT_S:g} s (`--worker-timeout`).
"""


def _endings(run: Run) -> str:
    heads = ["client", "requests", "right pictures", "told that it failed", "asked again"]
    rows, verdicts = [], run.diary.verdicts(run.tickets)
    for kind in CLIENTS:
        if own := [one for one in run.diary.endings if one.kind == kind]:
            codes = Counter(one.failure for one in own if one.failure)
            told = ", ".join(f"{count} {code}" for code, count in codes.most_common())
            tries = sum(count for (who, _), count in run.diary.again.items() if who == kind)
            longest = f"{max(one.took_s for one in own):.1f}"
            rows.append([kind, len(own), verdicts[kind, "right"], told or "0", tries, longest])
    return table([*heads, "longest (s)"], rows)


def _faults(run: Run) -> str:
    heads = ["fault", "times", "away, median (s)", "away, most (s)", "of that loading, most (s)"]
    rows = []
    for what in dict.fromkeys(one.what for one in run.struck):
        own = [one for one in run.struck if one.what == what]
        away, loading = [one.away_s for one in own], [one.loading_s for one in own]
        beyond = max(one.beyond_s for one in own)
        numbers = [statistics.median(away), max(away), max(loading), beyond]
        rows.append([what, len(own), *(f"{number:.1f}" for number in numbers)])
    return table([*heads, "beyond loading, most (s)"], rows)


def problems(run: Run) -> list[str]:
    """What breaks a promise."""
    found = run.findings
    late = [
        f"{one.what}: ready after {one.beyond_s:.1f} s beyond loading"
        for one in run.struck
        if one.beyond_s - _allowed_s(one.what) > READY_AGAIN_S
    ]
    wrong = [] if found.are_none else [f"{found.foreign} foreign, {found.spoiled} spoiled"]
    return [*found.lost, *found.duplicated, *late, *run.left_over, *wrong]


def _allowed_s(what: str) -> float:
    """What the fault itself takes: until it is noticed, or struck for the second time."""
    return WORKER_TIMEOUT_S if "stopped" in what else LOADING_S[1] if "as it loads" in what else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, help="end after so many")
    parser.add_argument(
        "--write", action="store_true", help="into docs/reliability.md, if all holds"
    )
    options = parser.parse_args()
    done = asyncio.run(run(options.minutes, options.seed, options.faults))
    print(text := page(done))
    for problem in (wrong := problems(done)):
        print(problem, file=sys.stderr)
    if options.write and not wrong:
        write_section("chaos", text)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
