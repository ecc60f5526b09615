"""Attack a server as one of its tenants, and measure the effect on the other tenant.

usage: make hostile     (or: python -m proof.hostile [--only NAME ...] [--setup SERVER ...]
                          [--write])

Two tenants have one key each. One attacks (`attacks.py`, each attack in its own process), the other
draws one-step pictures continuously, and a third client polls `/livez`. The setups are one worker,
two workers, and two models; then a server without keys, which pages of other origins attack too.
The attacker runs on the same two cores, so the measured effect includes its own CPU
time.
"""

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from proof.attacks import ATTACKS, BROWSER, GENERATIONS
from proof.house import House, adapters, fleet_of, open_house
from proof.page import conclude, machine, parser_of, table
from proof.soak import look

QUIET_S = 15.0
CALM_S = 2.0  # pause between attacks
PROMISED = 2.0  # median latency of the neighbour under attack, relative to quiet
PROMISED_MIB = 300.0  # growth of the front's memory, relative to quiet
FLAGS = ("--max-in-flight-per-key", "8", "--state-dir", "none", "--max-upload-bytes", "67108864")
KEYS = ("--api-key", "hostile=attacker-key", "--api-key", "neighbour=neighbour-key")
SETUPS = ("one worker", "two workers", "two models", "no keys")
"""The servers; the second and the third also have an adapter folder."""


@dataclass(slots=True)
class Felt:
    """The neighbour's measurements over a period. Seconds, MiB."""

    pictures_s: list[float] = field(default_factory=list)
    lives_s: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    failures: Counter[tuple[int, str]] = field(default_factory=Counter)  # by status and body

    @property
    def picture_s(self) -> float:
        return statistics.median(self.pictures_s) if self.pictures_s else float("inf")


@dataclass(frozen=True, slots=True)
class Attacked:
    """One attack and its results."""

    name: str
    answers: dict[str, int]
    wrong: list[str]
    felt: Felt
    quiet: Felt  # measurements of the same server without attacks
    setup: str = "one worker"

    @property
    def has_keys(self) -> bool:
        """Whether attacker and neighbour are separate tenants."""
        return self.setup != "no keys"

    @property
    def times(self) -> float:
        """Latency of the neighbour's pictures, relative to quiet."""
        return self.felt.picture_s / self.quiet.picture_s

    @property
    def grown_mib(self) -> float:
        """Peak of the front's memory, above its quiet median."""
        return max(self.felt.memory_mib) - statistics.median(self.quiet.memory_mib)


def problems(attacks: Sequence[Attacked]) -> list[str]:
    """Broken promises."""
    wrongs = []
    for attack in attacks:
        wrongs += [f"{attack.name}, {attack.setup}: {problem}" for problem in attack.wrong]
        for (status, message), times in attack.felt.failures.items():
            if attack.has_keys or status != 429:
                wrongs.append(f"{attack.name}: the neighbour was told {times} times {message}")
        if attack.has_keys and attack.times > PROMISED:
            wrongs.append(f"{attack.name}: the neighbour waits {attack.times:.1f} times as long")
        if attack.grown_mib > PROMISED_MIB:
            wrongs.append(f"{attack.name}: the front grows by {attack.grown_mib:.0f} MiB")
    return wrongs


@dataclass(slots=True)
class Neighbour:
    """The other tenant."""

    house: House
    http: httpx2.AsyncClient
    headers: dict[str, str]
    felt: Felt = field(default_factory=Felt)

    async def draw(self) -> None:
        body = {"prompt": "a red circle on a blue background", "num_inference_steps": 1, "seed": 1}
        url = f"{self.house.url}{GENERATIONS}"
        while True:
            began_s = time.monotonic()
            answer = await self.http.post(url, json=body, headers=self.headers, timeout=60)
            if answer.status_code != 200:
                self.felt.failures[answer.status_code, answer.text[:200]] += 1
            self.felt.pictures_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.1)

    async def ask(self) -> None:
        while True:
            began_s = time.monotonic()
            await self.http.get(f"{self.house.url}/livez", timeout=60)
            self.felt.lives_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.1)

    async def weigh(self) -> None:
        while True:
            values = look("front", self.house.front, 0.0).values
            self.felt.memory_mib.append(values["resident memory (MiB)"])
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(task()) for task in (self.draw, self.ask, self.weigh)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _attack(name: str, neighbour: Neighbour, key: str, quiet: Felt, setup: str) -> Attacked:
    command = [sys.executable, "-m", "proof.attacks", name, neighbour.house.url, "--key", key]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()  # wait for `ready`
    neighbour.felt = under_attack = Felt()
    process.stdin.write(b"\n")
    reply = json.loads(await process.stdout.readline() or b'{"answers": {}, "wrong": ["it broke"]}')
    await process.wait()
    await asyncio.sleep(CALM_S)  # the server still processes sent data
    return Attacked(name, reply["answers"], reply["wrong"], under_attack, quiet, setup)


def house_of(setup: str, folder: Path) -> House:
    """The server of a setup."""
    keys = () if setup == "no keys" else KEYS
    if setup == "two workers":
        return House(folder, (*FLAGS, *keys, "--workers", "2", *adapters(folder)))
    if setup == "two models":
        return House(folder, (*fleet_of(folder, 2), *FLAGS, *keys, *adapters(folder)), "")
    return House(folder, (*FLAGS, *keys))


async def measure(names: Sequence[str], setups: Sequence[str] = SETUPS) -> list[Attacked]:
    """Run attacks in sequence."""
    attacks: list[Attacked] = []
    keyless = [name for name in ATTACKS if name != "requests_without_a_key"] + [*BROWSER]
    for setup in setups:
        has_keys = setup != "no keys"
        key, neighbour_key = ("attacker-key", "neighbour-key") if has_keys else ("", "")
        kinds = ATTACKS if has_keys else keyless
        names_here = [name for name in kinds if name in names]
        if not names_here:
            continue
        with tempfile.TemporaryDirectory(prefix="carpool-proof-") as folder:
            house = house_of(setup, Path(folder))
            workers = 2 if setup in ("two workers", "two models") else 1
            async with (
                httpx2.AsyncClient(trust_env=False) as http,
                open_house(house, http, workers),
            ):
                headers = {"authorization": f"Bearer {neighbour_key}"} if neighbour_key else {}
                neighbour = Neighbour(house, http, headers)
                async with neighbour.living():
                    await asyncio.sleep(CALM_S)  # learns the costs of forwards
                    neighbour.felt = quiet = Felt()
                    await asyncio.sleep(QUIET_S)
                    attacks += [
                        await _attack(name, neighbour, key, quiet, setup) for name in names_here
                    ]
    return attacks


def page(attacks: Sequence[Attacked]) -> str:
    """The section of the page."""
    heads = ["attack", "answers", "a picture takes (ms)", "quiet (ms)", "times", "longest (ms)",
             "`/livez`, longest (ms)", "the front grows (MiB)"]  # fmt: skip
    rows: list[list[object]] = [
        [
            attack.name.replace("_", " ")
            + ("" if attack.setup == SETUPS[0] else f", {attack.setup}"),
            sum(attack.answers.values()),
            f"{1000 * attack.felt.picture_s:.0f}",
            f"{1000 * attack.quiet.picture_s:.0f}",
            f"{attack.times:.2f}",
            f"{1000 * max(attack.felt.pictures_s, default=0):.0f}",
            f"{1000 * max(attack.felt.lives_s, default=0):.0f}",
            f"{attack.grown_mib:.0f}",
        ]
        for attack in attacks
    ]
    return f"""Made by `python -m proof.hostile`.
Machine: {machine()}. Server: `carpool serve shapes {" ".join(FLAGS)}`,
with two keys: one worker, two workers, two models; and without keys.

Limits: another tenant's one-step picture takes at most {PROMISED:g} times as long as without the
attack (medians; without keys there is one tenant), the front grows by at most
{PROMISED_MIB:.0f} MiB, and no forbidden request is answered.
Violations: **{len(problems(attacks))}**. The attacks are in `proof/attacks.py`.

{table(heads, rows)}
"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[*ATTACKS, *BROWSER], metavar="NAME")
    parser.add_argument("--setup", nargs="*", default=[*SETUPS], choices=SETUPS)
    options = parser.parse_args()
    results = asyncio.run(measure(options.only, options.setup))
    for attack in results:
        print(attack.name, json.dumps(attack.answers), file=sys.stderr)
    is_whole = options.write and set(options.setup) == {*SETUPS}
    return conclude(page(results), problems(results), "hostile" if is_whole else None)


if __name__ == "__main__":
    raise SystemExit(main())
