"""Break a real server at random moments while four kinds of clients use it, and look for harm.

usage: make chaos     (or: PYTHONPATH=tests python -m proof.chaos [--minutes 10] [--seed 1]
                       [--faults N] [--workers N] [--write])
       make chaos-fleet  (with --workers 3)

The moments and the order of the faults follow from the seed; each kind comes equally often. All
the while every 500th forward runs out of memory. With several workers there are two models: one
has one worker, the other the rest; a fault hits any of them, and requests have priorities and
deadlines. Steps that are made again are counted by the front: those of requests whose steps are
told, streams and jobs, that a worker says for the second time.
"""

import argparse
import asyncio
import contextlib
import os
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
from proof.house import (
    RESTART_S,
    START_LIMIT_S,
    House,
    now_s,
    open_house,
    parent_of,
    start_of,
)
from proof.page import machine, table, write_section
from proof.tickets import EXACT, Ticket, tickets

CLIENTS = {"waits": 3, "streams": 2, "polls": 3, "vanishes": 2}
TICKETS = 24
WORKER_TIMEOUT_S = 5.0
READY_AGAIN_S = 5.0  # the promise: plus the time that loading takes
HELD_S = 2.0  # how long a connection is held: less than a worker may be silent
MODELS = ("one", "two")  # of a fleet
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
    loading_s: float  # of that: since the new worker's process, or its fork server, began

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
    workers: int = 1
    steps_again: int = 0

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
    workers: int = 1
    buried: set[int] = field(default_factory=set)  # workers that were killed or stopped
    known: set[int] = field(default_factory=set)  # workers that lived at the last fault

    @property
    def faults(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Every way to break it, by what the table calls it."""
        return {
            "worker killed": self._kill_worker,
            "worker killed, the next as it loads": self._kill_two_workers,
            "front killed": self._kill_front,
            "both killed": self._kill_both,
            "worker stopped": self._stop_worker,
            **({f"connection held for {HELD_S:g} s": self._hold} if self.workers > 1 else {}),
            f"disk full for {FULL_S:g} s": self._fill_disk,
            f"{STAMPEDE} clients vanish": self._stampede,
        }

    async def strike(self, what: str) -> Struck:
        """Break it, wait until it is ready again."""
        fault_s, self.known = now_s(), set(self.house.workers())
        if "killed" in what or "stopped" in what:
            await self.faults[what]()
            began_s = await self._loading_since(fault_s)
            ready_s = await self.house.ready(self.http)
            return Struck(what, ready_s - fault_s, ready_s - began_s)
        fault, was_away = asyncio.ensure_future(self.faults[what]()), False
        while not fault.done():
            was_away |= not await self.house.is_ready(self.http)
            await asyncio.sleep(0.05)
        await fault
        ready_s = await self.house.ready(self.http)
        return Struck(what, ready_s - fault_s if was_away else 0.0, 0.0)

    async def _loading_since(self, fault_s: float) -> float:
        """When the successor's process began, or that which made its imports after the fault.

        Raises:
            RuntimeError: there is none.
        """
        deadline_s = now_s() + START_LIMIT_S
        while now_s() < deadline_s:
            lost = self.buried | self.known
            if new := [pid for pid in self.house.workers() if pid not in lost]:
                is_fresh = (importing_s := start_of(parent_of(new[-1]))) >= fault_s
                is_forked = parent_of(new[-1]) != self.house.front
                return importing_s if is_fresh and is_forked else start_of(new[-1])
            await asyncio.sleep(0.02)
        raise RuntimeError(f"no new worker after {START_LIMIT_S:g} s:\n{self.house.last_words()}")

    def _signal(self, number: signal.Signals) -> int | None:
        """Send any worker a signal."""
        return self.house.signal_worker(number, self.rng.randrange(self.workers))

    async def _kill_worker(self) -> None:
        if (pid := self._signal(signal.SIGKILL)) is not None:
            self.buried.add(pid)

    async def _hold(self) -> None:
        """A worker says nothing for a while, and then goes on: nobody may have taken its place."""
        pid = self._signal(signal.SIGSTOP)
        await asyncio.sleep(HELD_S)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _kill_two_workers(self) -> None:
        await self._kill_worker()
        await self._loading_since(now_s())
        await asyncio.sleep(self.rng.uniform(*LOADING_S))
        self.known = set(self.house.workers())
        if (pid := self.house.signal_worker(signal.SIGKILL)) is not None:  # the newest
            self.buried.add(pid)

    async def _stop_worker(self) -> None:
        if (pid := self._signal(signal.SIGSTOP)) is not None:
            self.buried.add(pid)

    async def _kill_front(self) -> None:
        self.buried.update(self.house.workers())
        self.house.kill_front()
        await asyncio.sleep(RESTART_S)
        self.house.start()

    async def _kill_both(self) -> None:
        self._signal(signal.SIGKILL)
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


async def run(minutes: float, seed: int, most: int | None = None, workers: int = 1) -> Run:
    """Break a server for so long, or so often.

    Args:
        workers: of two models together; 1: one model.

    Raises:
        RuntimeError: it does not start, or does not come back.
    """
    rng, diary = random.Random(seed), Diary()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
    with tempfile.TemporaryDirectory(prefix="carpool-proof-") as name:
        folder = Path(name)
        flags: tuple[str, ...] = (*FLAGS, *EXACT, "--state-dir", str(folder / "state"))
        house = House(folder, flags, fault=FAULT)
        if workers > 1:
            (folder / "fleet.yaml").write_text(_models(workers))
            flags = (*flags, "--config", str(folder / "fleet.yaml"))
            house = House(folder, flags, "", fault=FAULT)
        again = 0
        async with httpx2.AsyncClient(
            base_url=house.url, timeout=None, limits=limits, trust_env=False
        ) as http:
            with disk(folder / "state", lambda: house.front) as volume:
                async with open_house(house, http):
                    await _all_ready(house, http, workers)
                    asked = await tickets(http, TICKETS, seed, MODELS if workers > 1 else ())
                    clients = Clients(http, asked, diary)
                    chaos, struck = (
                        Chaos(house, volume, clients, http, rng, workers),
                        list[Struck](),
                    )
                    kinds = order(list(chaos.faults), rng)
                    end_s = now_s() + 60 * minutes
                    async with asyncio.TaskGroup() as group:
                        for kind, count in CLIENTS.items():
                            for number in range(count):
                                group.create_task(clients.run(kind, number, seed))
                        while now_s() < end_s and (most is None or len(struck) < most):
                            await asyncio.sleep(rng.uniform(*CALM_S))
                            before = await _steps_again(http)
                            kills_front = "front" in (kind := next(kinds)) or "both" in kind
                            again += before if kills_front else 0  # its successor counts anew
                            struck.append(await chaos.strike(kind))
                            print(f"{struck[-1].what}: away {struck[-1].away_s:.1f} s",
                                  file=sys.stderr)  # fmt: skip
                        clients.is_over = True
                    left_over = await _left_over(house, http, 2 + workers)
                    again += await _steps_again(http)
                    await clients.last_look()
            kind_of_disk = "a tmpfs" if volume.is_mounted else "a limit on file sizes"
    return Run(minutes, seed, struck, diary, asked, left_over, kind_of_disk, workers, again)


def _models(workers: int) -> str:
    """A file of settings with two models that have so many workers together."""
    counts = (workers - 1, 1)
    several = [f"  - {{model: shapes, name: {name}, workers: {count}}}\n"
               for name, count in zip(MODELS, counts, strict=True)]  # fmt: skip
    return "models:\n" + "".join(several)


async def _all_ready(house: House, http: httpx2.AsyncClient, workers: int) -> None:
    """Wait until every worker has loaded its model."""
    for _ in range(int(START_LIMIT_S / 0.5)):
        health = (await http.get(f"{house.url}/health")).json()
        states = [one["state"] for one in health.get("workers", [])]
        if workers == 1 or (len(states) == workers and set(states) == {"ready"}):
            return
        await asyncio.sleep(0.5)
    raise RuntimeError(f"not all workers are ready:\n{house.last_words()}")


async def _steps_again(http: httpx2.AsyncClient) -> int:
    """Steps that the server saw for the second time, since its front began."""
    try:
        stats = (await http.get("/stats", timeout=5.0)).json()
    except httpx2.RequestError:
        return 0
    return int(stats.get("steps_again") or 0)


async def _left_over(house: House, http: httpx2.AsyncClient, processes: int) -> list[str]:
    """What is still there although nobody asks any more: processes, requests.

    Args:
        processes: that belong there: the front, the fork server, the workers.
    """
    for _ in range(100):
        stats = (await http.get("/stats")).json()
        held = {name: stats[name] for name in ("running", "waiting") if stats.get(name)}
        extra = len(house.processes()) - processes
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
    several = f" --workers {run.workers}" if run.workers > 1 else ""
    return f"""Made by `PYTHONPATH=tests python -m proof.chaos --minutes {run.minutes:g} \
--seed {run.seed}{several}`.
Machine: {machine()}. The disk is {run.disk}.

Lost: **{len(found.lost)}**. Duplicated: **{len(found.duplicated)}**. Foreign pictures: \
**{found.foreign}**; other than drawn alone: **{found.spoiled}**. Left over in the server: \
**{len(run.left_over)}**.

{_endings(run)}

{run.diary.gone} clients hung up. The others asked again because of: {reasons or "nothing"}.

{_faults(run)}

{_again(run)}

All the while every {round(1 / OUT_OF_MEMORY)}th forward runs out of memory.

*Away* is from the fault to the next `/health` 200, *loading* from the start of the new worker's
process. A stopped worker is taken for dead after {WORKER_TIMEOUT_S:g} s (`--worker-timeout`).
"""


def _again(run: Run) -> str:
    """Steps that were made again, for each death."""
    deaths = sum("killed" in one.what or "stopped" in one.what for one in run.struck)
    each = run.steps_again / deaths if deaths else 0.0
    return (
        f"Steps that were told for the second time: {run.steps_again}, {each:.1f} for each of "
        f"{deaths} deaths."
    )


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
    parser.add_argument("--workers", type=int, default=1, help="3: of two models, at any of which")
    parser.add_argument("--faults", type=int, help="end after so many")
    parser.add_argument(
        "--write", action="store_true", help="into docs/reliability.md, if all holds"
    )
    options = parser.parse_args()
    done = asyncio.run(run(options.minutes, options.seed, options.faults, options.workers))
    print(text := page(done))
    for problem in (wrong := problems(done)):
        print(problem, file=sys.stderr)
    if options.write and not wrong:
        write_section("chaos-fleet" if options.workers > 1 else "chaos", text)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
