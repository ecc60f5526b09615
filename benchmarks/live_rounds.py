"""The measurements of the live benchmark: each party under each load, in rounds.

Requests arrive by a Poisson process whether or not earlier ones were answered, and their latency
counts from the arrival. In a round every party gets the same requests at the same times.
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
WARMUP = 16  # requests at once: enough for an engine to learn what widths take
ALIKE = 1  # of 255: company moves the last bits of floats, which tips a value here and there


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """The settings of the benchmark."""

    parties: Sequence[Party]
    loads: Sequence[float] = (0.5, 0.9, 1.5)  # of what the server with the lock can do
    steps: Sequence[int] = (8, 12, 20, 28)
    guidance: Sequence[float] = (2.0, 3.0)
    count: int = 66  # requests at the highest load; the others last as long
    rounds: int = 3

    @property
    def mix(self) -> Mix:
        """Every setting with every prompt; none of the prompts was trained on."""
        settings = product(self.steps, self.guidance)
        texts = prompts(50)
        return Mix(
            [Setting({"num_inference_steps": n, "guidance_scale": g}, texts) for n, g in settings]
        )

    def arrivals(self, load: float, rate_qps: float, number: int) -> list[Arrival]:
        """The arrivals of a round: the same requests in every round, at other times."""
        when, (_, rng) = generators(number)[0], generators(0)
        count = max(1, round(self.count * load / max(self.loads)))
        return plan(bursts(rate_qps, when, size=1), self.mix, rng, count=count)


@dataclass(frozen=True, slots=True)
class Reference:
    """The server with the lock under a closed loop of one client."""

    capacity_qps: float
    solo: SoloLatencies
    pictures: Mapping[int, Image.Image]  # by seed: what plain diffusers draws


@dataclass(frozen=True, slots=True)
class LivePoint:
    """One party under one load in one round."""

    party: Party
    load: float
    round: int
    arrivals: Sequence[Arrival]
    outcomes: Sequence[RequestResult]
    summary: Summary
    right: float  # share of pictures that show what was asked for
    plain_right: float  # the same of plain diffusers' pictures
    alike: float  # share of pictures that are those of plain diffusers
    before: Mapping[str, Any]  # the server's statistics; empty for those who have none
    after: Mapping[str, Any]


class Album:
    """Asks a server and keeps its pictures, undecoded while time is measured."""

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
    """Start a server, warm it up, and put it under every load."""
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
    """Shares of pictures that are right, of plain diffusers' that are, and of those alike.

    Args:
        pictures: by seed; one that is missing is neither right nor alike.
        plain: by seed, all of them.
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
    """Every party in every round; in the next round the first comes last."""
    for number in range(1, rounds + 1):
        first = (number - 1) % len(parties)
        yield from ((number, party) for party in (*parties[first:], *parties[:first]))
