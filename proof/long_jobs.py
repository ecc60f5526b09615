"""Kill a server's processes repeatedly during long jobs: each job ends with its picture.

usage: make long-jobs   (or: python -m proof.long_jobs [--jobs 20] [--steps 1000] [--seed 1]
                         [--workers 2] [--calm 1.0] [--write])

Two workers serve one model. The jobs are drawn once without faults, then submitted again. Shortly
after the server is ready and a job has advanced, a fault follows, in an order determined by the
seed: kill a worker, the fork server with all workers, all workers at once, the front, both, or the
front on a full disk. This repeats until all jobs have ended. Each job must be completed with the
identical picture, and its progress must never fall.
"""

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
from proof.page import conclude, machine, parser_of, table
from proof.tickets import ENDPOINT, EXACT
from training.shapes.draw import prompts

LONGEST_S = 3000.0  # timeout of a run
EVERY_S = 0.5  # poll interval of the jobs


@dataclass(slots=True)
class Job:
    """One job of the run under kills."""

    body: dict[str, Any]
    peaceful: bytes  # its file without faults
    id: str = ""
    progress: int = 0
    has_fallen: bool = False  # its progress fell
    status: str = ""
    error: Any = None
    content: bytes = b""


@dataclass(slots=True)
class Run:
    """The results of a run."""

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
        calm_s: longest time from progress to the next fault.

    Raises:
        RuntimeError: the server does not recover.
    """
    result = Run(steps, seed, workers, calm_s)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="carpool-proof-")))
        flags = (*FLAGS, *EXACT, "--state-dir", str(folder / "state"))
        flags_of_workers = ("--workers", str(workers)) if workers > 1 else ()
        house = House(folder, (*flags, *flags_of_workers))
        volume = stack.enter_context(disk(folder / "state", lambda: house.front))
        async with (
            httpx2.AsyncClient(base_url=house.url, timeout=30, trust_env=False) as http,
            open_house(house, http, workers),
        ):
            bodies = [
                {"prompt": prompt, "seed": number, "num_inference_steps": steps}
                for number, prompt in enumerate(prompts(jobs))
            ][:jobs]
            result.jobs = [Job(body, b"") for body in bodies]
            await _draw(http, result.jobs)
            for job in result.jobs:
                job.peaceful, job.content, job.progress, job.status = job.content, b"", 0, ""
            chaos = Chaos(
                house, volume, Clients(http, [], Diary()), http, random.Random(seed), workers
            )
            began_s = now_s()
            drawing = asyncio.create_task(_draw(http, result.jobs))
            try:
                await _strike(chaos, drawing, result, calm_s)
            finally:
                drawing.cancel()
            result.took_s = now_s() - began_s
    return result


async def _strike(chaos: Chaos, drawing: "asyncio.Task[None]", result: Run, calm_s: float) -> None:
    """Kill until all jobs have ended."""
    kinds = order([kind for kind in chaos.faults if "killed" in kind], chaos.rng)
    deadline_s = now_s() + LONGEST_S
    while now_s() < deadline_s:
        before = sum(job.progress for job in result.jobs)
        while not drawing.done() and sum(job.progress for job in result.jobs) <= before:
            await asyncio.wait([drawing], timeout=EVERY_S)
        await asyncio.wait([drawing], timeout=chaos.rng.uniform(0.0, calm_s))
        if drawing.done():
            drawing.result()
            return
        result.struck.append(await chaos.strike(fault := next(kinds)))
        away_s = result.struck[-1].away_s
        print(f"{fault}: away {away_s:.1f} s; {_progress(result)}", file=sys.stderr)


def _progress(result: Run) -> str:
    percents = [job.progress for job in result.jobs if not job.status]
    return f"{len(percents)} jobs at {min(percents, default=100)} to {max(percents, default=100)} %"


async def _draw(http: httpx2.AsyncClient, jobs: list[Job]) -> None:
    """Submit jobs, and poll until all have ended; retries after any answer."""
    for number, job in enumerate(jobs):
        key = {"idempotency-key": f"{'again' if job.peaceful else 'peace'}-{number}"}
        body = {**job.body, "background_job": True}
        answer = await _asked(http, "POST", ENDPOINT, json=body, headers=key)
        job.id = answer.json()["id"]
    while open_jobs := [job for job in jobs if not job.status]:
        for job in open_jobs:
            status = (await _asked(http, "GET", f"/v1/jobs/{job.id}")).json()
            job.has_fallen |= status["progress"] < job.progress
            job.progress = status["progress"]
            if status["status"] in ENDS:
                for file in status.get("files") or ():
                    job.content = (await _asked(http, "GET", file["url"])).content
                job.status, job.error = status["status"], status.get("error")
        await asyncio.sleep(EVERY_S)


async def _asked(http: httpx2.AsyncClient, method: str, path: str, **options: Any) -> Any:
    """Send a request with retries, because the server may be down."""
    while True:
        with contextlib.suppress(httpx2.RequestError):
            answer = await http.request(method, path, **options)
            if answer.status_code < 500:
                answer.raise_for_status()
                return answer
        await asyncio.sleep(EVERY_S)


def problems(result: Run) -> list[str]:
    """Broken promises."""
    wrong = [
        f"job {job.id} {job.status or 'never ended'}: {job.error}"
        for job in result.jobs
        if job.status != "completed"
    ]
    spoiled = [job.id for job in result.jobs if job.content != job.peaceful]
    backward = [job.id for job in result.jobs if job.has_fallen]
    return [
        *wrong,
        *(f"the picture of job {name} is another one" for name in spoiled),
        *(f"the progress of job {name} fell" for name in backward),
    ]


def page(result: Run) -> str:
    """The section of the page."""
    right = sum(job.content == job.peaceful != b"" for job in result.jobs)
    counts = Counter(fault.what for fault in result.struck)
    return f"""Made by `python -m proof.long_jobs --jobs {len(result.jobs)} --steps {result.steps} \
--seed {result.seed} --workers {result.workers} --calm {result.calm_s:g}`.
Machine: {machine()}.

**{right}** of {len(result.jobs)} jobs of {result.steps} steps ended bit for bit with the \
picture of a run without faults, in {result.took_s:.0f} s and under {len(result.struck)} faults, \
each at most {result.calm_s:g} s after any job had advanced since the last. \
Jobs whose progress fell: **{sum(job.has_fallen for job in result.jobs)}**.

{table(["fault", "times"], [[fault, count] for fault, count in counts.most_common()])}
"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--calm", type=float, default=1.0, help="most seconds between faults")
    options = parser.parse_args()
    result = asyncio.run(
        run(options.jobs, options.steps, options.seed, options.workers, options.calm)
    )
    return conclude(page(result), problems(result), "long-jobs" if options.write else None)


if __name__ == "__main__":
    raise SystemExit(main())
