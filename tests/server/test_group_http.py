"""A server whose worker is a group of two ranks: what it says of them, and the death of one."""

import base64
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.pictures import gap, picture
from support.server_process import PATIENCE_S, drawn_by_diffusers, eventually, serving

STEPS = 120


@pytest.mark.slow
@pytest.mark.timeout(400)  # two processes import torch, twice
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_restarts_the_group_and_its_requests_go_on(rank: int) -> None:
    """At most the step under way runs again; the picture is the same; no process is left."""
    flags = ("--context-parallel", "2", "--device", "cpu", "--state-dir", "none")
    with serving(*flags) as server, ThreadPoolExecutor(2) as threads:
        [worker] = server.get("/health").json()["workers"]
        before = server.stats()["group"]["ranks"]
        drawing = [
            threads.submit(server.draw, seed=seed, num_inference_steps=STEPS) for seed in (1, 2)
        ]
        eventually(lambda: server.stats()["steps"] >= STEPS, 60, "they are half way")
        os.kill(before[rank]["pid"], signal.SIGKILL)

        answers = [one.result(3 * PATIENCE_S) for one in drawing]
        eventually(lambda: server.health() == 200, PATIENCE_S, "it is ready again")
        stats = server.stats()

    assert worker["ranks"] == 2
    assert [one["device"] for one in before] == ["cpu", "cpu"]
    assert not {one["pid"] for one in before} & {one["pid"] for one in stats["group"]["ranks"]}
    assert stats["steps"] <= 2 * STEPS - STEPS + 2  # of the second group
    assert [one.status_code for one in answers] == [200, 200]
    for seed, answer in zip((1, 2), answers, strict=True):
        mine = picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        plain = drawn_by_diffusers("a red circle", seed, num_inference_steps=STEPS)
        assert gap(mine, plain) <= 1
