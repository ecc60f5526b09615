"""Break a real server at random times while four kinds of clients use it, and check for harm.

usage: make chaos     (or: python -m proof.chaos [--minutes 10] [--seed 1]
                       [--faults N] [--workers N] [--ray] [--write])
       make chaos-fleet  (with --workers 3)
       make chaos-ray    (with --workers 3 --ray)

The seed determines the times and the order of the faults; all kinds are equally frequent. Every
500th forward runs out of memory. With several workers there are two models: one has one worker, the
other has the rest; faults hit any worker, and requests have priorities and deadlines. The front
counts repeated steps: steps of streams and jobs that a worker reports for the second time. With
`--ray` the workers are on two nodes of a Ray cluster on this machine: nodes are killed and stopped,
and workers are cut off for longer than the front waits; workers of a killed front continue with the
next front.
"""

import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from proof import nodes as ray_nodes
from proof.chaos_report import (
    FULL_S,
    LOADING_S,
    OUT_OF_MEMORY,
    STOPPED_IN_LOAD,
    WORKER_TIMEOUT_S,
    Run,
    Struck,
    page,
    problems,
)
from proof.clients import SILENCE_S, Clients
from proof.diary import Diary
from proof.disk import Disk, disk
from proof.house import (
    MODELS,
    RESTART_S,
    START_LIMIT_S,
    House,
    fleet_of,
    now_s,
    open_house,
    parent_of,
    start_of,
)
from proof.nodes import Nodes, send
from proof.page import conclude, parser_of
from proof.tickets import EXACT, tickets

CLIENTS = {"waits": 3, "streams": 2, "polls": 3, "vanishes": 2}
TICKETS = 24
HELD_S = 2.0  # a worker's silence, shorter than its timeout
CUT_S = 6.0  # stop of a node or cut-off of a worker, longer than the timeout
PLACING_S = 150.0  # answer timeout: Ray must notice, place, start and import again
LONE_S = 3.0  # delay until a killed node is replaced
CALM_S = (2.0, 10.0)  # from readiness to the next fault
STAMPEDE = 40  # clients that disconnect at once
FAULT = f"forward:memory:{OUT_OF_MEMORY:g}"
FLAGS = ("--worker-timeout", f"{WORKER_TIMEOUT_S:g}")


@dataclass(slots=True)
class Chaos:
    """Breaks one server."""

    house: House
    disk: Disk
    clients: Clients
    http: httpx2.AsyncClient
    rng: random.Random
    workers: int = 1
    nodes: Nodes | None = None  # the workers' nodes; None: this machine, without Ray
    buried: set[int] = field(default_factory=set)  # workers that were killed or stopped
    living: set[int] = field(default_factory=set)  # live workers at the last fault

    @property
    def faults(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """All faults, by their name in the table."""
        return {
            "worker killed": self._kill_worker,
            "worker killed, the next as it loads": self._kill_two_workers,
            "front killed": self._kill_front,
            f"front killed, the disk full for {FULL_S:g} s": self._kill_front_on_full_disk,
            "both killed": self._kill_both,
            "worker stopped": self._stop_worker,
            **({} if self.nodes else {"fork server killed": self._kill_fork_server}),
            **(
                {
                    f"connection held for {HELD_S:g} s": self._hold,
                    "all workers killed at once": self._kill_all_workers,
                }
                if self.workers > 1
                else {}
            ),
            **(
                {
                    f"node killed, another after {LONE_S:g} s": self._kill_node,
                    f"node frozen for {CUT_S:g} s": self._freeze_node,
                    f"worker cut off for {CUT_S:g} s": self._cut_off,
                }
                if self.nodes
                else {}
            ),
            f"disk full for {FULL_S:g} s": self._fill_disk,
            f"{STAMPEDE} clients vanish": self._stampede,
        }

    async def strike(self, fault: str) -> Struck:
        """Inject a fault, and wait until the server is ready again."""
        fault_s, self.living = now_s(), set(self.house.workers())
        is_whole = await self.house.is_whole(self.http, self.workers)
        breaking, was_away, ready_s = asyncio.ensure_future(self._break(fault, fault_s)), False, 0.0
        while not breaking.done():
            if not await self.house.is_ready(self.http):
                was_away, ready_s = True, 0.0
            elif not ready_s:
                ready_s = now_s()
            await asyncio.sleep(0.05)
        began_s = await breaking
        if not await self.house.is_ready(self.http):
            was_away, ready_s = True, 0.0
        ready_s = ready_s or await self.house.ready(self.http)
        name = fault if is_whole or "stopped" not in fault else STOPPED_IN_LOAD
        if not was_away:
            return Struck(name, 0.0, 0.0)
        if "node killed" in fault:
            began_s = start_of(self.house.workers()[-1])
        return Struck(name, ready_s - fault_s, max(0.0, ready_s - (began_s or ready_s)))

    async def _break(self, fault: str, fault_s: float) -> float:
        """Inject a fault; returns the restart time of a killed process, 0.0 if none was killed."""
        await self.faults[fault]()
        if "node" in fault or not ("killed" in fault or "stopped" in fault):
            return 0.0
        if self.nodes and self.kills_front(fault):  # its workers survive
            return start_of(self.house.front)
        return await self._loading_since(fault_s)

    async def _loading_since(self, fault_s: float) -> float:
        """The start of the successor's process, or of the process that imported for it.

        Raises:
            RuntimeError: there is no successor, or the front has exited.
        """
        deadline_s = now_s() + START_LIMIT_S
        while now_s() < deadline_s:
            dead = self.buried | self.living
            if new := [pid for pid in self.house.workers() if pid not in dead]:
                is_fresh = (importing_s := start_of(parent_of(new[-1]))) >= fault_s
                is_forked = parent_of(new[-1]) != self.house.front
                return importing_s if is_fresh and is_forked else start_of(new[-1])
            self.house.check_alive()
            await asyncio.sleep(0.02)
        raise RuntimeError(f"no new worker after {START_LIMIT_S:g} s:\n{self.house.last_words()}")

    def _signal(self, number: signal.Signals) -> int | None:
        """Send a signal to a random worker."""
        return self.house.signal_worker(number, self.rng.randrange(self.workers))

    async def _kill_worker(self) -> None:
        if (pid := self._signal(signal.SIGKILL)) is not None:
            self.buried.add(pid)

    async def _hold(self) -> None:
        """A worker is silent for a while and continues: it must not be replaced."""
        pid = self._signal(signal.SIGSTOP)
        await asyncio.sleep(HELD_S)
        send([] if pid is None else [pid], signal.SIGCONT)

    async def _kill_node(self) -> None:
        assert self.nodes is not None
        await asyncio.to_thread(self.nodes.kill, self.rng)
        await asyncio.sleep(LONE_S)
        self.nodes.add()  # on the main thread, because Ray sets signal handlers

    async def _freeze_node(self) -> None:
        assert self.nodes is not None
        await self._freeze(self.nodes.processes(self.rng, self.house))

    async def _cut_off(self) -> None:
        """A cut-off worker keeps running, while another worker takes over its requests."""
        assert self.nodes is not None
        await self._freeze(self.nodes.host(self.rng, self.house))

    @staticmethod
    async def _freeze(pids: list[int]) -> None:
        send(pids, signal.SIGSTOP)
        await asyncio.sleep(CUT_S)
        send(pids, signal.SIGCONT)

    @staticmethod
    def kills_front(fault: str) -> bool:
        return "front" in fault or "both" in fault

    async def _kill_two_workers(self) -> None:
        await self._kill_worker()
        await self._loading_since(now_s())
        await asyncio.sleep(self.rng.uniform(*LOADING_S))
        self.living = set(self.house.workers())
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

    async def _kill_front_on_full_disk(self) -> None:
        """The next front finds a full disk, and must wait for space."""
        self.disk.fill()
        await self._kill_front()
        await asyncio.sleep(FULL_S)
        self.disk.free()

    async def _kill_fork_server(self) -> None:
        """All its workers die with it."""
        self._bury(self.house.fork_servers())

    async def _kill_all_workers(self) -> None:
        self._bury(self.house.workers())

    def _bury(self, pids: list[int]) -> None:
        self.buried.update(self.house.workers())
        send(pids, signal.SIGKILL)

    async def _kill_both(self) -> None:
        self._signal(signal.SIGKILL)
        await self._kill_front()

    async def _fill_disk(self) -> None:
        self.disk.fill()
        await asyncio.sleep(FULL_S)
        self.disk.free()

    async def _stampede(self) -> None:
        tickets = self.rng.choices(self.clients.tickets, k=STAMPEDE)
        await asyncio.gather(*(self.clients.vanish(ticket, self.rng) for ticket in tickets))


def order(faults: list[str], rng: random.Random) -> Iterator[str]:
    """Yield faults endlessly: every round has all faults, in a new order."""
    while True:
        yield from rng.sample(faults, len(faults))


async def run(
    minutes: float, seed: int, limit: int | None = None, workers: int = 1, *, on_ray: bool = False
) -> Run:
    """Break a server for a time, or a number of faults.

    Args:
        workers: total workers of two models; 1: one model.
        on_ray: run the workers on two nodes of a cluster.

    Raises:
        RuntimeError: the server does not start or recover.
    """
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="carpool-proof-"))
        folder, mark = Path(name), uuid.uuid4().hex
        flags: tuple[str, ...] = (*FLAGS, *EXACT, "--state-dir", str(folder / "state"))
        model, there = "shapes", None
        if workers > 1:
            flags, model = (*flags, *fleet_of(folder, workers)), ""
        if on_ray:
            there = stack.enter_context(ray_nodes.nodes(mark, name, FAULT))
            flags = (*flags, *there.flags)
        house = House(folder, flags, model, fault="" if on_ray else FAULT, mark=mark)
        volume = stack.enter_context(disk(folder / "state", lambda: house.front))
        return await _break(house, volume, minutes, seed, limit, workers, there)


async def _break(
    house: House,
    volume: Disk,
    minutes: float,
    seed: int,
    limit: int | None,
    workers: int,
    there: Nodes | None,
) -> Run:
    rng, diary, struck, again = random.Random(seed), Diary(), list[Struck](), 0
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
    async with (
        httpx2.AsyncClient(
            base_url=house.url, timeout=None, limits=limits, trust_env=False
        ) as http,
        open_house(house, http, workers),
    ):
        plan = await tickets(http, TICKETS, seed, MODELS if workers > 1 else ())
        silence_s = SILENCE_S if there is None else PLACING_S
        clients = Clients(http, plan, diary, silence_s=silence_s)
        chaos = Chaos(house, volume, clients, http, rng, workers, there)
        kinds = order(list(chaos.faults), rng)
        end_s = now_s() + 60 * minutes
        async with asyncio.TaskGroup() as group:
            for kind, count in CLIENTS.items():
                for number in range(count):
                    group.create_task(clients.run(kind, number, seed))
            while now_s() < end_s and (limit is None or len(struck) < limit):
                await asyncio.sleep(rng.uniform(*CALM_S))
                before = await _steps_again(http)
                fault = next(kinds)  # a new front restarts its counters
                again += before if chaos.kills_front(fault) else 0
                struck.append(await chaos.strike(fault))
                print(f"{fault}: away {struck[-1].away_s:.1f} s", file=sys.stderr)
            clients.is_over = True
        left_over = await _left_over(house, http, workers, on_ray=there is not None)
        again += await _steps_again(http)
        await clients.last_look()
    kind_of_disk = "a tmpfs" if volume.is_mounted else "a limit on file sizes"
    return Run(
        minutes, seed, struck, diary, plan, left_over, kind_of_disk, workers, again,
        on_ray=there is not None,
    )  # fmt: skip


async def _steps_again(http: httpx2.AsyncClient) -> int:
    """Steps that the server received a second time since its front's start."""
    try:
        stats = (await http.get("/stats", timeout=5.0)).json()
    except httpx2.RequestError:
        return 0
    return int(stats.get("steps_again") or 0)


async def _left_over(
    house: House, http: httpx2.AsyncClient, workers: int, *, on_ray: bool
) -> list[str]:
    """Processes and requests that remain after all clients have finished."""
    for _ in range(100):
        stats = (await http.get("/stats")).json()
        busy = {name: stats[name] for name in ("running", "waiting") if stats.get(name)}
        # expected: front, fork server, workers; a cluster has more processes
        extra = len(house.workers()) if on_ray else len(house.processes()) - 2
        extra -= workers
        if not busy and extra <= 0:  # a worker may still be loading on another node
            return []
        await asyncio.sleep(0.1)
    return [f"{extra} processes", *(f"{name}: {count}" for name, count in busy.items())]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="3: workers of two models")
    parser.add_argument("--faults", type=int, help="stop after this many")
    parser.add_argument("--ray", action="store_true", help="workers on two nodes of a Ray cluster")
    options = parser.parse_args()
    result = asyncio.run(
        run(options.minutes, options.seed, options.faults, options.workers, on_ray=options.ray)
    )
    section = "chaos-ray" if options.ray else "chaos-fleet" if options.workers > 1 else "chaos"
    return conclude(page(result), problems(result), section if options.write else None)


if __name__ == "__main__":
    raise SystemExit(main())
