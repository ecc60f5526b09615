"""The loads of the comparison, and what a server makes of them.

A burst is 16 requests at once; a lone request has the server to itself; Poisson arrivals come at
1.2 times what plain diffusers can do one after another, their steps and guidance mixed; abandoned
are three long requests whose clients hang up, ahead of a lone one. The pictures of bursts are
compared with those of plain diffusers.
"""

import asyncio
import base64
import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from benchmarks.agreement import Agreement, agreement
from benchmarks.peers.models import PeerModel
from benchmarks.peers.parties import Server
from carpool.config import BatchingMode
from carpool_lab.load.client import LoadClient, RequestError
from carpool_lab.load.generator import run
from carpool_lab.workload import Arrival, bursts, generators
from proof.tickets import decoded, gap

BURST, MIXES = 16, ("equal", "steps+guidance", "steps")
LOADS = (*MIXES, "lone", "poisson", "abandoned")  # of a round, in this order
LONE = 5  # one after another, in a round
POISSON, OVERLOAD = 24, 1.2  # arrivals in a round; times the capacity of plain diffusers
ABANDONED, HANG_UP_S = 3, 0.3
ALIKE = 2  # of 255: company moves the last bits of floats, which tips a value here and there


@dataclass(slots=True)
class Figures:
    """What one server did in one round. Seconds; CPU time is for each picture."""

    per_s: dict[str, float] = field(default_factory=dict)  # pictures, by the mix of the burst
    cpu_s: dict[str, float] = field(default_factory=dict)  # by mix, and `lone`
    lone_s: float = 0.0
    poisson_s: list[float] = field(default_factory=list)  # latencies
    late_s: float = 0.0  # a lone request behind abandoned ones, over one without
    pictures: dict[str, bytes] = field(default_factory=dict)  # PNG, by mix and number
    failed: int = 0
    simulated: Agreement | None = None  # the Poisson load, measured and simulated


class Visitor:
    """Sends the loads of one model to one server, round by round; use it as `async with`.

    Args:
        mode: Poisson loads are simulated, too, in this mode; None: they are not.

    Attributes:
        rounds: the figures of each round; the last one is under way.
    """

    def __init__(self, server: Server, model: PeerModel, mode: BatchingMode | None = None) -> None:
        self._server, self._model, self._mode = server, model, mode
        self._client = LoadClient(server.url, "text-to-image", api_key="none", timeout_s=600.0)
        self.rounds: list[Figures] = []

    async def __aenter__(self) -> Self:
        for _ in range(2):  # imports, kernels
            await self._client.ask(self._model.body(0, 2))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    @property
    def _now(self) -> Figures:
        return self.rounds[-1]

    def _first(self, load: str) -> int:
        """The first number of the requests of a load in this round."""
        return 1000 * (10 * len(self.rounds) + LOADS.index(load))

    async def visit(self, load: str, capacity_qps: float) -> None:
        """Send one load; the first one of `LOADS` begins a round.

        Args:
            capacity_qps: of plain diffusers.
        """
        if load == LOADS[0]:
            self.rounds.append(Figures())
        if load in MIXES:
            await self._burst(load)
        elif load == "lone":
            numbers = range(self._first(load), self._first(load) + LONE)
            self._now.lone_s = statistics.median([await self._lone(n) for n in numbers])
        elif load == "poisson":
            await self._poisson(OVERLOAD * capacity_qps)
        else:
            await self._abandoned()

    async def _burst(self, mix: str) -> None:
        first, figures = self._first(mix), self._now
        arrivals = [Arrival(0.0, body) for body in self._model.burst(mix, BURST, first)]

        async def ask(body: Mapping[str, Any]) -> dict[str, Any]:
            answer = await self._client.ask(body)
            picture = base64.b64decode(answer["data"][0]["b64_json"])
            figures.pictures[f"{mix} {body['seed'] - first}"] = picture
            return answer

        with self._cpu(mix, BURST):
            results = await run(arrivals, ask)
        answered = [result for result in results if result.failure is None]
        figures.failed += len(results) - len(answered)
        figures.per_s[mix] = len(answered) / max(result.done_s for result in results)

    async def _lone(self, number: int) -> float:
        began_s = time.perf_counter()
        with self._cpu("lone", LONE):
            try:
                await self._client.ask(self._model.body(number))
            except RequestError:
                self._now.failed += 1
        return time.perf_counter() - began_s

    async def _poisson(self, rate_qps: float) -> None:
        bodies = self._model.burst("steps+guidance", POISSON, self._first("poisson"))
        times_s = bursts(rate_qps, generators(len(self.rounds))[0], size=1)
        arrivals = [Arrival(next(times_s), body) for body in bodies]
        before = await self._client.statistics()
        results = await run(arrivals, self._client.ask)
        latencies_s = self._now.poisson_s = [r.latency_s for r in results if r.failure is None]
        if self._mode is not None:
            after = await self._client.statistics()
            run_of = self._mode, OVERLOAD, arrivals, latencies_s
            self._now.simulated = agreement(*run_of, before, after)
        self._now.failed += sum(result.failure is not None for result in results)

    async def _abandoned(self) -> None:
        first = self._first("abandoned")
        bodies = [self._model.body(first + n, self._model.abandoned) for n in range(ABANDONED)]
        tasks = [asyncio.create_task(self._client.ask(body)) for body in bodies]
        await asyncio.sleep(HANG_UP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        began_s = time.perf_counter()
        with contextlib.suppress(RequestError):
            await self._client.ask(self._model.body(first + ABANDONED))
        self._now.late_s = time.perf_counter() - began_s - self._now.lone_s

    @contextlib.contextmanager
    def _cpu(self, name: str, pictures: int) -> Iterator[None]:
        """Add the CPU time of the server, for each of so many pictures, to the figures."""
        began_s = self._server.cpu_s()
        yield
        now_s, cpu_s = self._server.cpu_s(), self._now.cpu_s
        if now_s is not None and began_s is not None:
            cpu_s[name] = cpu_s.get(name, 0.0) + (now_s - began_s) / pictures


def wrong(pictures: Mapping[str, bytes], plain: Mapping[str, bytes]) -> int:
    """How many pictures are not those of plain diffusers; a missing one counts."""
    return sum(
        name not in pictures or gap(decoded(pictures[name]), decoded(picture)) > ALIKE
        for name, picture in plain.items()
    )


def median(figures: Sequence[Figures], name: str, mix: str = "") -> float | None:
    """The median over the rounds of a figure; None: no round has it."""
    values = [getattr(round_, name) for round_ in figures]
    if mix:
        values = [value[mix] for value in values if mix in value]
    return statistics.median(values) if values else None
