"""The measurements of the live benchmark: each party under each load, in rounds.

Requests arrive by a Poisson process, without waiting for answers, and their latency counts from the
arrival. In a round every party gets the same requests at the same times.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from benchmarks.parties import LOCKED, Party, running
from carpool_lab.load.client import LoadClient
from carpool_lab.load.generator import RequestResult, SoloLatencies, run, samples, warm_up, with_slo
from carpool_lab.load.report import Summary, summarise
from carpool_lab.workload import Arrival, Mix, Setting, bursts, generators, plan
from training.shapes.draw import prompts
from training.shapes.judge import shows

SLO_SCALE = 5.0
WARMUP = 16  # simultaneous requests, enough to learn the costs of widths
ALIKE = 1  # of 255: batching changes last bits of floats, and so some values


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """The settings of the benchmark."""

    parties: Sequence[Party]
    loads: Sequence[float] = (0.5, 0.9, 1.5)  # relative to the capacity of the server with the lock
    steps: Sequence[int] = (8, 12, 20, 28)
    guidance: Sequence[float] = (2.0, 3.0)
    count: int = 66  # requests at the highest load; other loads last as long
    rounds: int = 3

    @property
    def mix(self) -> Mix:
        """All settings with all prompts; none of the prompts was in the training set."""
        settings = product(self.steps, self.guidance)
        texts = prompts(50)
        return Mix(
            [Setting({"num_inference_steps": n, "guidance_scale": g}, texts) for n, g in settings]
        )

    def arrivals(self, load: float, rate_qps: float, number: int) -> list[Arrival]:
        """The arrivals of a round: equal requests in every round, at different times."""
        when, (_, rng) = generators(number)[0], generators(0)
        count = max(1, round(self.count * load / max(self.loads)))
        return plan(bursts(rate_qps, when, size=1), self.mix, rng, count=count)


@dataclass(frozen=True, slots=True)
class Reference:
    """The server with the lock under a closed loop of one client."""

    capacity_qps: float
    solo: SoloLatencies
    pictures: Mapping[int, Image.Image]  # plain diffusers' pictures by seed


@dataclass(frozen=True, slots=True)
class LivePoint:
    """One party at one load in one round."""

    party: Party
    load: float
    round: int
    arrivals: Sequence[Arrival]
    outcomes: Sequence[RequestResult]
    summary: Summary
    right: float  # share of pictures that match their prompt
    plain_right: float  # the same for plain diffusers' pictures
    alike: float  # share of pictures equal to plain diffusers'
    before: Mapping[str, Any]  # the server's statistics; empty if it has none
    after: Mapping[str, Any]


class Album:
    """Sends requests and stores the pictures, to decode them after the measurement."""

    def __init__(self, client: LoadClient) -> None:
        self._client = client
        self._pictures: dict[int, str] = {}

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._client.ask(body)
        self._pictures[body["seed"]] = answer["data"][0]["b64_json"]
        return answer

    def pictures(self) -> dict[int, Image.Image]:
        """By seed."""
        return {
            seed: Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")
            for seed, text in self._pictures.items()
        }


def _client(url: str) -> LoadClient:
    return LoadClient(url, "text-to-image", api_key="none", timeout_s=600.0)


async def reference(settings: LiveSettings, cache: Path) -> Reference:
    """Measure capacity and solo latencies, and draw every picture with plain diffusers."""
    all_arrivals = settings.arrivals(max(settings.loads), inf, 0)
    async with running(LOCKED, cache) as url, _client(url) as client:
        album = Album(client)
        solo = await warm_up(samples(all_arrivals), client.ask, rounds=3)
        outcomes = await run(all_arrivals, album.ask, max_concurrency=1, is_closed=True)
    return Reference(summarise(outcomes, {}).throughput_qps, solo, album.pictures())


async def visit(
    party: Party, number: int, settings: LiveSettings, baseline: Reference, cache: Path
) -> list[LivePoint]:
    """Start a server, warm it up, and measure it at every load."""
    async with running(party, cache) as url, _client(url) as client:
        warm = settings.arrivals(max(settings.loads), inf, number)[:WARMUP]
        await run(warm, client.ask)
        points = []
        for load in settings.loads:
            arrivals = settings.arrivals(load, load * baseline.capacity_qps, number)
            album, before = Album(client), await client.statistics()
            outcomes = with_slo(await run(arrivals, album.ask), baseline.solo, SLO_SCALE)
            after = await client.statistics()
            shares = judged(arrivals, album.pictures(), baseline.pictures)
            points.append(
                LivePoint(party, load, number, arrivals, outcomes, summarise(outcomes, {}), *shares,
                      before, after)
            )  # fmt: skip
    return points


def judged(
    arrivals: Sequence[Arrival],
    pictures: Mapping[int, Image.Image],
    plain: Mapping[int, Image.Image],
) -> tuple[float, float, float]:
    """Shares of right pictures, of plain diffusers' right pictures, and of equal pictures.

    Args:
        pictures: pictures by seed; a missing one is neither right nor equal.
        plain: all of plain diffusers' pictures by seed.
    """
    right = plain_right = alike = 0
    for arrival in arrivals:
        prompt, seed = arrival.body["prompt"], arrival.body["seed"]
        plain_right += shows(plain[seed], prompt)
        if seed in pictures:
            right += shows(pictures[seed], prompt)
            alike += gap(pictures[seed], plain[seed]) <= ALIKE
    count = len(arrivals)
    return right / count, plain_right / count, alike / count


def gap(first: Image.Image, second: Image.Image) -> int:
    """The largest difference between two pictures, 0-255."""
    bands = ImageChops.difference(first, second).getextrema()
    return max(int(high) for _, high in bands)  # type: ignore[misc]


def turns(parties: Sequence[Party], rounds: int) -> Iterator[tuple[int, Party]]:
    """Yield every party in every round; the order rotates each round."""
    for number in range(1, rounds + 1):
        first = (number - 1) % len(parties)
        yield from ((number, party) for party in (*parties[first:], *parties[:first]))
