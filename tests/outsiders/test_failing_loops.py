"""A worker whose engine's loop fails: what it ran goes on in the next worker, as after a kill."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2
import pytest

from support.pictures import ALIKE, gap, picture
from support.server_process import PATIENCE_S, Server, drawn_by_diffusers, eventually, serving

pytestmark = pytest.mark.timeout(300)

PROMPT, STEPS = "a red circle", 80  # more than two workers make, however wide their forwards are
OFTEN = 0.03  # of its turns: the first that fails is each worker's 36th
JOBS, REQUESTS = (1, 2), (3, 4)  # their seeds


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(fault=f"turn:unprintable:{OFTEN}") as server:
        yield server


def asked(server: Server, seed: int, **fields: Any) -> dict[str, Any]:
    """The answer to a request, which is sent again while no worker is there, as SDKs do."""
    answers = list[httpx2.Response]()

    def is_taken() -> bool:
        answers.append(server.draw(prompt=PROMPT, seed=seed, num_inference_steps=STEPS, **fields))
        return answers[-1].status_code != 503

    eventually(is_taken, PATIENCE_S, "a worker takes it")
    taken: dict[str, Any] = answers[-1].raise_for_status().json()
    return taken


def is_right(content: bytes, seed: int) -> bool:
    reference = drawn_by_diffusers(PROMPT, seed, num_inference_steps=STEPS)
    return gap(picture(content), reference) <= ALIKE


def test_jobs_and_requests_of_workers_whose_loops_fail_end_with_their_pictures(
    server: Server,
) -> None:
    job_ids = [asked(server, seed, background_job=True)["id"] for seed in JOBS]
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        answers = list(threads.map(partial(asked, server), REQUESTS))
    for seed, answer in zip(REQUESTS, answers, strict=True):
        assert is_right(base64.b64decode(answer["data"][0]["b64_json"]), seed)

    for seed, job_id in zip(JOBS, job_ids, strict=True):
        job: dict[str, Any] = {}

        def has_ended(job_id: str = job_id, job: dict[str, Any] = job) -> bool:
            job |= server.get(f"/v1/jobs/{job_id}").json()
            return bool(job["status"] not in ("queued", "in_progress"))

        eventually(has_ended, PATIENCE_S, "the job ends")
        assert (job["status"], job["error"]) == ("completed", None)
        assert is_right(server.get(job["files"][0]["url"]).content, seed)

    assert server.stderr.count("a turn of the engine failed") >= 2
    assert server.stderr.count("the worker died") >= 2
