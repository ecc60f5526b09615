"""`carpool bench --sweep`: all batching modes under the same loads, each on its own server.

First a closed loop measures the capacity of `continuous`. A load of 0.9 then means 0.9 times that
rate in an open loop, with the same requests in the same order for every mode.
"""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from carpool.errors import CarpoolError
from carpool_lab.load.client import BenchTask, LoadClient
from carpool_lab.load.generator import SoloLatencies, Tick, run, samples, warm_up, with_slo
from carpool_lab.load.report import Summary, summarise
from carpool_lab.markdown import table
from carpool_lab.workload import Arrival, Mix, bursts, generators, plan

FLAGS: dict[str, tuple[str, ...]] = {
    # the default limit of `continuous`
    "dynamic": ("--batching-max-size", "8"),
    "request": ("--max-num-seqs", "8"),
}
"""Flags that a mode needs for batching."""

QUIET = {"TQDM_DISABLE": "1", "DIFFUSERS_VERBOSITY": "error"}
"""Environment of the servers: they log only errors."""

COLUMNS = (
    "mode", "load", "rate (req/s)", "throughput (req/s)", "latency mean (s)", "median (s)",
    "P99 (s)", "SLO attainment", "goodput (req/s)", "failed",
)  # fmt: skip

StartServer = Callable[[str, str], AbstractAsyncContextManager[str]]
"""Starts a server for a model and a mode; yields its URL. `serving`, or a fake."""

SweepStage = Callable[[str, int], Tick]
"""Called with the name of a stage and its number of requests; returns a callback for each."""


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """The settings of a sweep."""

    model: str
    modes: Sequence[str]
    loads: Sequence[float]  # fractions of the capacity
    mix: Mix
    task: BenchTask = "text-to-image"
    count: int = 100  # requests at each load
    burst: int = 1  # simultaneous arrivals
    clients: int = 16  # clients of the closed loop for the capacity
    warmup: int = 2  # rounds of warm-up
    slo_scale: float = 5.0
    seed: int = 0
    api_key: str = "none"
    timeout_s: float = 3600.0

    def arrivals(self, rate_per_s: float) -> list[Arrival]:
        """The arrivals of a run, with equal requests in all runs; an infinite rate: all at once."""
        when, rng = generators(self.seed)
        times = bursts(rate_per_s, when, size=self.burst)
        return plan(times, self.mix, rng, count=self.count)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One mode at one load."""

    mode: str
    load: float
    rate_qps: float
    summary: Summary


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The points of a sweep."""

    model: str
    capacity_qps: float  # capacity of `continuous`, in a closed loop
    slo_scale: float
    points: Sequence[SweepPoint]

    def table(self) -> str:
        """The points as a Markdown table."""
        return (
            f"{self.model}: {self.capacity_qps:.3f} req/s is load 1 (closed loop, continuous); "
            f"goodput counts answers within {self.slo_scale:g} times their solo latency\n\n"
            f"{table(COLUMNS, map(_row, self.points))}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@contextlib.asynccontextmanager
async def serving(model: str, mode: str) -> AsyncIterator[str]:
    """Run `carpool serve` on a free port; yields its URL when ready.

    Raises:
        CarpoolError: the server stopped; its messages went to standard error.
    """
    flags = ["--host", "127.0.0.1", "--port", "0", "--log-level", "warning"]
    flags += ["--batching-mode", mode, *FLAGS.get(mode, ())]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "carpool.cli.main", "serve", model, *flags,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env=QUIET | os.environ,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if match := re.search(r" at (http://\S+)", line.decode()):
                break
        else:
            command = f"carpool serve {model} --batching-mode {mode}"
            raise CarpoolError(f"`{command}` did not start; its messages are above")
        yield match[1]
    finally:
        with contextlib.suppress(ProcessLookupError):  # already stopped
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout=60)
        except TimeoutError:
            process.kill()
            await process.wait()


async def sweep(
    settings: SweepSettings, stage: SweepStage, *, start: StartServer = serving
) -> SweepReport:
    """Measure every mode at every load.

    Raises:
        CarpoolError: a server does not start, or refuses single requests.
    """
    plan_of_arrivals = settings.arrivals(inf)
    async with _warm(settings, "continuous", start, stage) as (client, solo):
        tick = stage("capacity", settings.count)
        outcomes = await run(
            plan_of_arrivals,
            client.ask,
            max_concurrency=settings.clients,
            is_closed=True,
            tick=tick,
        )
    capacity_qps = summarise(outcomes, {}).throughput_qps
    if not capacity_qps:
        raise CarpoolError(f"no request succeeded; the first failed with {outcomes[0].message}")
    points = []
    for mode in settings.modes:
        async with _warm(settings, mode, start, stage) as (client, _):
            for load in settings.loads:
                arrivals = settings.arrivals(load * capacity_qps)
                tick = stage(f"{mode} at {load:g}", settings.count)
                outcomes = await run(arrivals, client.ask, tick=tick)
                outcomes = with_slo(outcomes, solo, settings.slo_scale)
                summary = summarise(outcomes, await client.statistics())
                points.append(SweepPoint(mode, load, load * capacity_qps, summary))
    return SweepReport(settings.model, capacity_qps, settings.slo_scale, points)


@contextlib.asynccontextmanager
async def _warm(
    settings: SweepSettings, mode: str, start: StartServer, stage: SweepStage
) -> AsyncIterator[tuple[LoadClient, SoloLatencies]]:
    """Yield a warmed-up server in this mode, with its solo latencies."""
    bodies = samples(settings.arrivals(inf))
    async with (
        start(settings.model, mode) as url,
        LoadClient(
            url, settings.task, api_key=settings.api_key, timeout_s=settings.timeout_s
        ) as client,
    ):
        tick = stage(f"{mode}, warmup", settings.warmup * len(bodies))
        yield client, await warm_up(bodies, client.ask, rounds=settings.warmup, tick=tick)


def _row(point: SweepPoint) -> list[str]:
    summary = point.summary
    return [
        point.mode,
        f"{point.load:g}",
        f"{point.rate_qps:.3f}",
        f"{summary.throughput_qps:.3f}",
        *(
            "n/a" if seconds is None else f"{seconds:.3f}"
            for seconds in (summary.latency_mean, summary.latency_median, summary.latency_p99)
        ),
        f"{summary.slo_attainment_rate or 0:.0%}",
        f"{summary.goodput_qps or 0:.3f}",
        str(summary.failed_requests),
    ]
