"""A server whose worker is a group of two ranks: what it says of them, and the death of one."""

import base64
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import server_process
from support.pictures import gap, picture

STEPS = 120


@pytest.mark.slow
@pytest.mark.timeout(400)  # two processes import torch, twice
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_restarts_the_group_and_its_requests_go_on(rank: int) -> None:
    """At most the step under way runs again; the picture is the same; no process is left."""
    flags = ("--context-parallel", "2", "--device", "cpu", "--state-dir", "none")
    with server_process.serving(*flags) as server, ThreadPoolExecutor(2) as threads:
        [worker] = server.get("/health").json()["workers"]
        before = server.stats()["group"]["ranks"]
        drawing = [
            threads.submit(server.draw, seed=seed, num_inference_steps=STEPS) for seed in (1, 2)
        ]
        server_process.eventually(lambda: server.stats()["steps"] >= STEPS, 60, "they are half way")
        os.kill(before[rank]["pid"], signal.SIGKILL)

        answers = [one.result(3 * server_process.PATIENCE_S) for one in drawing]
        server_process.eventually(
            lambda: server.health() == 200, server_process.PATIENCE_S, "it is ready again"
        )
        stats = server.stats()

    assert worker["ranks"] == 2
    assert [one["device"] for one in before] == ["cpu", "cpu"]
    assert not {one["pid"] for one in before} & {one["pid"] for one in stats["group"]["ranks"]}
    assert stats["steps"] <= 2 * STEPS - STEPS + 2  # of the second group
    assert [one.status_code for one in answers] == [200, 200]
    for seed, answer in zip((1, 2), answers, strict=True):
        mine = picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        plain = server_process.drawn_by_diffusers("a red circle", seed, num_inference_steps=STEPS)
        assert gap(mine, plain) <= 1


def followers(server: server_process.Server) -> list[int]:
    """Processes that a worker has started."""
    found = []
    for pid in server.processes():
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent in server.workers():
            found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)  # two processes import torch, twice
def test_a_rank_that_is_killed_while_the_group_loads_is_tried_again_as_a_worker_is() -> None:
    flags = ("--context-parallel", "2", "--device", "cpu", "--state-dir", "none")
    with server_process.starting(*flags) as server:
        server_process.eventually(
            lambda: bool(followers(server)), server_process.PATIENCE_S, "a follower is loading"
        )
        os.kill(followers(server)[0], signal.SIGKILL)

        server.wait_ready()
        assert server.draw().status_code == 200
