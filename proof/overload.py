"""Send a server ten times its capacity, and measure the effect.

usage: make overload     (or: python -m proof.overload [--seconds 60] [--write])

First a closed loop measures the capacity, with as many clients as the server admits. Then requests
arrive at random (Poisson) at ten times that rate. After their end, one client sends requests in
sequence until the latency is back to normal. Finally the capacity is measured again, and the mean
of both measurements counts, because other load on the machine changes.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from carpool_lab.load.client import LoadClient
from carpool_lab.load.generator import RequestResult, run
from carpool_lab.workload import Arrival, Mix, Setting, bursts, generators, plan
from proof.house import House, open_house
from proof.page import conclude, machine, parser_of, table
from training.shapes.draw import prompts

ABOARD = 8
FLAGS = ("--max-running", str(ABOARD), "--max-queue", str(ABOARD), "--state-dir", "none")
STEPS = 8
TIMES = 10.0  # load relative to capacity
MEASURED_S = 20.0  # duration of a capacity measurement
AT_REST = 1.5  # normal latency, relative to a single request
SLO = 3.0  # latency target, relative to the latency at capacity

# The promises.
REFUSED_S = 0.05  # median
GOODPUT = 0.9  # relative to the peak
BACK = 2.0  # seconds, in latencies at capacity


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements."""

    alone_s: float  # median latency at rest
    service_s: float  # median latency at capacity
    capacity_qps: float
    seconds: float
    outcomes: Sequence[RequestResult]  # results under overload
    back_s: float  # recovery time after the load's end

    @property
    def refused_s(self) -> list[float]:
        """Durations of refusals."""
        return [answer.done_s - answer.sent_s for answer in self.outcomes if _is_refusal(answer)]

    @property
    def accepted(self) -> list[RequestResult]:
        return [outcome for outcome in self.outcomes if not _is_refusal(outcome)]

    @property
    def goodput_qps(self) -> float:
        """Pictures in time per second, during the load."""
        in_time = [
            outcome
            for outcome in self.accepted
            if outcome.failure is None
            and outcome.latency_s <= SLO * self.service_s
            and outcome.done_s <= self.seconds
        ]
        return len(in_time) / self.seconds

    def problems(self) -> list[str]:
        """Promises that do not hold."""
        failed = [outcome.failure for outcome in self.accepted if outcome.failure]
        claims = {
            f"{len(failed)} accepted ones failed: {sorted(set(map(str, failed)))}": not failed,
            "too few were refused": len(self.refused_s) > len(self.outcomes) / 2,
            "refusals are slow": statistics.median(self.refused_s or [0.0]) < REFUSED_S,
            "goodput falls": self.goodput_qps >= GOODPUT * self.capacity_qps,
            "latency stays": self.back_s <= BACK * self.service_s,
        }
        return [problem for problem, holds in claims.items() if not holds]


def _is_refusal(outcome: RequestResult) -> bool:
    return outcome.failure is not None and outcome.failure.startswith("429")


def _arrivals(rate_qps: float, seconds: float, seed: int) -> list[Arrival]:
    when, rng = generators(seed)
    mix = Mix([Setting({"num_inference_steps": STEPS}, prompts(50))])
    arrivals = plan(
        bursts(rate_qps, when, size=1), mix, rng, count=round(2 * rate_qps * seconds) + 20
    )
    return [arrival for arrival in arrivals if arrival.at_s < seconds]


async def measure(seconds: float) -> Run:
    """Run all measurements in sequence.

    Raises:
        CarpoolError, RuntimeError: the server fails single requests.
    """
    with tempfile.TemporaryDirectory(prefix="carpool-proof-") as name:
        house = House(Path(name), FLAGS)
        async with (
            httpx2.AsyncClient(trust_env=False) as http,
            open_house(house, http),
            LoadClient(house.url, "text-to-image", api_key="none", timeout_s=120.0) as client,
        ):
            await _closed(client, ABOARD, MEASURED_S / 2)  # learns the costs of widths
            alone = [await _latency_s(client) for _ in range(9)]
            before = await _closed(client, ABOARD, MEASURED_S)
            rate_qps = TIMES * len(before) / MEASURED_S
            arrivals = _arrivals(rate_qps, seconds, seed=1)
            load = asyncio.create_task(run(arrivals, client.ask))
            await asyncio.sleep(seconds)
            back_s = await _back_s(client, AT_REST * statistics.median(alone))
            outcomes = await load
            after = await _closed(client, ABOARD, MEASURED_S)
    return Run(
        alone_s=statistics.median(alone),
        service_s=statistics.median([*before, *after]),
        capacity_qps=(len(before) + len(after)) / (2 * MEASURED_S),
        seconds=seconds,
        outcomes=outcomes,
        back_s=back_s,
    )


_BODY: Mapping[str, Any] = {
    "prompt": "a red circle on a blue background",
    "num_inference_steps": STEPS,
}


async def _latency_s(client: LoadClient) -> float:
    began_s = time.monotonic()
    await client.ask(_BODY)
    return time.monotonic() - began_s


async def _closed(client: LoadClient, clients: int, seconds: float) -> list[float]:
    """Latencies of the requests of a closed loop of `clients` during `seconds`."""
    latencies, end_s = list[float](), time.monotonic() + seconds

    async def one() -> None:
        while True:
            latency_s = await _latency_s(client)
            if time.monotonic() > end_s:
                return
            latencies.append(latency_s)

    await asyncio.gather(*(one() for _ in range(clients)))
    return latencies


async def _back_s(client: LoadClient, normal_s: float) -> float:
    """Seconds until a new request has normal latency; refusals do not count."""
    began_s = time.monotonic()
    while True:
        sent_s = time.monotonic()
        try:
            if await _latency_s(client) <= normal_s:
                return sent_s - began_s
        except Exception as error:  # still refused
            if not str(getattr(error, "reason", "")).startswith("429"):
                raise
            await asyncio.sleep(0.02)


def page(run: Run) -> str:
    """The section of the page."""
    refused, accepted = run.refused_s, run.accepted
    quantiles = statistics.quantiles(refused, n=100) if len(refused) > 1 else [0.0] * 99
    rows: list[list[object]] = [
        ["latency alone, median", f"{run.alone_s:.2f} s", ""],
        [f"latency of {ABOARD} at once, median", f"{run.service_s:.2f} s", ""],
        ["capacity", f"{run.capacity_qps:.2f}/s", ""],
        ["offered load", f"{len(run.outcomes) / run.seconds:.1f}/s for {run.seconds:.0f} s", ""],
        ["refused", len(refused), ""],
        ["a refusal takes, median", f"{1000 * quantiles[49]:.0f} ms",
         f"under {1000 * REFUSED_S:.0f} ms"],
        ["a refusal takes, p99", f"{1000 * quantiles[98]:.0f} ms", ""],
        ["accepted", len(accepted), ""],
        ["accepted, but failed", sum(outcome.failure is not None for outcome in accepted), "0"],
        ["goodput", f"{run.goodput_qps:.2f}/s, {run.goodput_qps / run.capacity_qps:.0%} of the "
         "capacity", f"at least {GOODPUT:.0%}"],
        ["latency is back to normal after", f"{run.back_s:.2f} s, "
         f"{run.back_s / run.service_s:.1f} service times", f"within {BACK:g}"],
    ]  # fmt: skip
    return f"""Made by `python -m proof.overload --seconds {run.seconds:.0f}`.
Machine: {machine()}. Server: `carpool serve shapes {" ".join(FLAGS)}`; {STEPS} steps.

{table(["measure", "result", "promise"], rows)}

Goodput counts pictures within {SLO:g} service times; a service time is the latency at capacity.
Normal latency is at most {AT_REST:g} times the latency alone.
"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    result = asyncio.run(measure(options.seconds))
    return conclude(page(result), result.problems(), "overload" if options.write else None)


if __name__ == "__main__":
    raise SystemExit(main())
