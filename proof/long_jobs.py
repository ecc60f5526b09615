"""Kill a server's processes again and again while it runs long jobs: each ends with its picture.

usage: make long-jobs   (or: python -m proof.long_jobs [--jobs 20] [--steps 1000] [--seed 1]
                         [--workers 2] [--calm 1.0] [--write])

Two workers serve one model. The jobs are drawn once in peace. Then they are submitted again. When
the server is ready again and any of the jobs has advanced, some moments later, something is
killed, in an order that follows from the seed: a worker, the fork server with all workers, all
workers at once, the front, both, and the front on a full disk. That goes on until all jobs have
ended. Each has to be completed with the very same picture, and its progress must never fall.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from proof.chaos import FLAGS, Chaos, order
from proof.chaos_report import Struck
from proof.clients import Clients
from proof.diary import Diary
from proof.disk import disk
from proof.history import ENDS
from proof.house import House, now_s, open_house
from proof.page import machine, table, write_section
from proof.tickets import ENDPOINT, EXACT
from training.shapes.draw import prompts

LONGEST_S = 3000.0  # until a run counts as one that does not end
EVERY_S = 0.5  # between looks at the jobs


@dataclass(slots=True)
class Job:
    """One job of the run under kills."""

    body: dict[str, Any]
    peaceful: bytes  # its file, drawn in peace
    id: str = ""
    progress: int = 0
    has_fallen: bool = False  # its progress
    status: str = ""
    error: Any = None
    content: bytes = b""


@dataclass(slots=True)
class Run:
    """What came of it."""

    steps: int
    seed: int
    workers: int
    calm_s: float
    jobs: list[Job] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    took_s: float = 0.0


async def run(jobs: int, steps: int, seed: int, workers: int, calm_s: float) -> Run:
    """Run long jobs under kills.

    Args:
        calm_s: the most between some progress and the next fault.

    Raises:
        RuntimeError: the server does not come back.
    """
    done = Run(steps, seed, workers, calm_s)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="carpool-proof-")))
        flags = (*FLAGS, *EXACT, "--state-dir", str(folder / "state"))
        several = ("--workers", str(workers)) if workers > 1 else ()
        house = House(folder, (*flags, *several))
        volume = stack.enter_context(disk(folder / "state", lambda: house.front))
        async with (
            httpx2.AsyncClient(base_url=house.url, timeout=30, trust_env=False) as http,
            open_house(house, http),
        ):
            await house.all_ready(http, workers)
            bodies = [
                {"prompt": prompt, "seed": number, "num_inference_steps": steps}
                for number, prompt in enumerate(prompts(jobs))
            ][:jobs]
            done.jobs = [Job(body, b"") for body in bodies]
            await _draw(http, done.jobs)
            for job in done.jobs:
                job.peaceful, job.content, job.progress, job.status = job.content, b"", 0, ""
            chaos = Chaos(
                house, volume, Clients(http, [], Diary()), http, random.Random(seed), workers
            )
            began_s = now_s()
            drawing = asyncio.create_task(_draw(http, done.jobs))
            try:
                await _strike(chaos, drawing, done, calm_s)
            finally:
                drawing.cancel()
            done.took_s = now_s() - began_s
    return done


async def _strike(chaos: Chaos, drawing: "asyncio.Task[None]", done: Run, calm_s: float) -> None:
    """Kill until all jobs have ended."""
    kinds = order([kind for kind in chaos.faults if "killed" in kind], chaos.rng)
    deadline_s = now_s() + LONGEST_S
    while now_s() < deadline_s:
        before = sum(job.progress for job in done.jobs)
        while not drawing.done() and sum(job.progress for job in done.jobs) <= before:
            await asyncio.wait([drawing], timeout=EVERY_S)
        await asyncio.wait([drawing], timeout=chaos.rng.uniform(0.0, calm_s))
        if drawing.done():
            drawing.result()
            return
        done.struck.append(await chaos.strike(fault := next(kinds)))
        print(f"{fault}: away {done.struck[-1].away_s:.1f} s; {_progress(done)}", file=sys.stderr)


def _progress(done: Run) -> str:
    percents = [job.progress for job in done.jobs if not job.status]
    return f"{len(percents)} jobs at {min(percents, default=100)} to {max(percents, default=100)} %"


async def _draw(http: httpx2.AsyncClient, jobs: list[Job]) -> None:
    """Submit jobs, and follow them until all have ended; asks again whatever is answered."""
    for number, job in enumerate(jobs):
        key = {"idempotency-key": f"{'again' if job.peaceful else 'peace'}-{number}"}
        body = {**job.body, "background_job": True}
        answer = await _asked(http, "POST", ENDPOINT, json=body, headers=key)
        job.id = answer.json()["id"]
    while open_jobs := [job for job in jobs if not job.status]:
        for job in open_jobs:
            shown = (await _asked(http, "GET", f"/v1/jobs/{job.id}")).json()
            job.has_fallen |= shown["progress"] < job.progress
            job.progress = shown["progress"]
            if shown["status"] in ENDS:
                for file in shown.get("files") or ():
                    job.content = (await _asked(http, "GET", file["url"])).content
                job.status, job.error = shown["status"], shown.get("error")
        await asyncio.sleep(EVERY_S)


async def _asked(http: httpx2.AsyncClient, method: str, path: str, **options: Any) -> Any:
    """The answer of a server that may be away."""
    while True:
        with contextlib.suppress(httpx2.RequestError):
            answer = await http.request(method, path, **options)
            if answer.status_code < 500:
                answer.raise_for_status()
                return answer
        await asyncio.sleep(EVERY_S)


def problems(done: Run) -> list[str]:
    """What breaks the promise."""
    wrong = [
        f"job {job.id} {job.status or 'never ended'}: {job.error}"
        for job in done.jobs
        if job.status != "completed"
    ]
    spoiled = [job.id for job in done.jobs if job.content != job.peaceful]
    fallen = [job.id for job in done.jobs if job.has_fallen]
    return [
        *wrong,
        *(f"the picture of job {name} is another one" for name in spoiled),
        *(f"the progress of job {name} fell" for name in fallen),
    ]


def page(done: Run) -> str:
    """The section of the page."""
    right = sum(job.content == job.peaceful != b"" for job in done.jobs)
    counts = Counter(one.what for one in done.struck)
    return f"""Made by `python -m proof.long_jobs --jobs {len(done.jobs)} --steps {done.steps} \
--seed {done.seed} --workers {done.workers} --calm {done.calm_s:g}`.
Machine: {machine()}.

**{right}** of {len(done.jobs)} jobs of {done.steps} steps ended with the picture that they have \
in peace, bit by bit, in {done.took_s:.0f} s and under {len(done.struck)} faults, each at most \
{done.calm_s:g} s after any job had advanced since the last. Progress that fell: \
**{sum(job.has_fallen for job in done.jobs)}**.

{table(["fault", "times"], [[what, count] for what, count in counts.most_common()])}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--calm", type=float, default=1.0, help="seconds between faults, at most")
    parser.add_argument(
        "--write", action="store_true", help="into docs/reliability.md, if all holds"
    )
    options = parser.parse_args()
    done = asyncio.run(
        run(options.jobs, options.steps, options.seed, options.workers, options.calm)
    )
    print(text := page(done))
    for problem in (wrong := problems(done)):
        print(problem, file=sys.stderr)
    if options.write and not wrong:
        write_section("long-jobs", text)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
