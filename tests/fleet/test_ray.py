"""Workers on a real Ray cluster of two nodes: placed, taken over, killed with their node, replaced.

`make test-ray`; the same without Ray, by fakes: `test_remote_connection.py`, `test_adoption.py`.
"""

import base64
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proof.nodes import ENVIRONMENT, NODE
from support.endpoints import ENDPOINT
from support.pictures import gap, picture
from support.server_process import Server, body, drawn_by_diffusers, eventually, serving

pytest.importorskip("ray", reason="needs Ray: `make test-ray` installs it")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

PLACE_S = 120
STEPS = 100
MARK = f"CLUSTER_TEST={uuid.uuid4().hex}"  # in the environment of everything on the cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head without room for workers, and two nodes with room for two each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in ENVIRONMENT.items():
            patch.setenv(name, text)
        patch.setenv(*MARK.split("="))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        from ray.cluster_utils import Cluster

        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        started = Cluster(initialize_head=True, head_node_args=head)
        try:
            started.node = [started.add_node(**NODE) for _ in range(2)]
            yield started
        finally:
            started.shutdown()


@contextmanager
def fleet(cluster: Any, name: str, *flags: str, ready: int = 2) -> Iterator[Server]:
    """A server whose workers are on the cluster; when it has ended they stay for ten seconds."""
    said = ["--ray", cluster.address, "--fleet-name", name, "--device", "cpu"]
    with serving(*said, "--worker-keep-alive", "10", *flags) as server:
        eventually(lambda: up(server) == ready, PLACE_S, f"{ready} workers are ready")
        yield server


def up(server: Server) -> int:
    return sum(one["state"] == "ready" for one in server.get("/health").json()["workers"])


def hosted() -> set[int]:
    """The processes on the cluster that hold a model."""
    found = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {int(entry.name) for entry in found if is_hosted(entry)}


def is_hosted(entry: Path) -> bool:
    try:
        is_worker = b"carpool.worker.process" in (entry / "cmdline").read_bytes()
        return is_worker and MARK.encode() in (entry / "environ").read_bytes()
    except OSError:  # it ended just now, or is another user's
        return False


def is_right(encoded: str, seed: int) -> bool:
    """Whether it is the picture of plain diffusers."""
    plain = drawn_by_diffusers("a red circle", seed, num_inference_steps=STEPS)
    return gap(picture(base64.b64decode(encoded)), plain) <= 1


def streamed(server: Server, seed: int) -> list[dict[str, Any]]:
    asked = body(seed=seed, num_inference_steps=STEPS, stream=True, partial_images=2)
    with server.client() as client:
        text = client.post(ENDPOINT, json=asked).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def started_job(server: Server, seed: int) -> str:
    asked = body(seed=seed, num_inference_steps=STEPS, background_job=True)
    with server.client() as client:
        return str(client.post(ENDPOINT, json=asked).json()["id"])


def ended_job(server: Server, job: str) -> dict[str, Any]:
    def status() -> str:
        return str(server.get(f"/v1/jobs/{job}").json()["status"])

    eventually(lambda: status() not in ("queued", "in_progress"), 120, "the job ends")
    answer: dict[str, Any] = server.get(f"/v1/jobs/{job}").json()
    return answer


def test_a_killed_node_loses_nothing_and_the_front_acts_within_three_seconds(cluster: Any) -> None:
    with fleet(cluster, "death", "--workers", "2", "--workers-per-node", "1") as server:
        with ThreadPoolExecutor(8) as threads:
            drawing = [
                threads.submit(server.draw, seed=seed, num_inference_steps=STEPS)
                for seed in range(5)
            ]
            streams = [threads.submit(streamed, server, seed) for seed in (5, 6)]
            job = started_job(server, 7)
            eventually(
                lambda: all(one["running"] for one in server.stats()["workers"]), 60, "all run"
            )
            killed_s = time.monotonic()
            cluster.remove_node(cluster.node.pop(), allow_graceful=False)
            eventually(lambda: up(server) == 1, 10, "the front knows")
            noticed_s = time.monotonic() - killed_s
            answers = [one.result() for one in drawing]
            told = [one.result() for one in streams]

        assert [one.status_code for one in answers] == [200] * 5
        assert all(is_right(one.json()["data"][0]["b64_json"], n) for n, one in enumerate(answers))
        for seed, events in zip((5, 6), told, strict=True):
            done = [one for one in events if one["type"] == "image_generation.completed"]
            assert len(done) == 1, events
            assert is_right(done[0]["b64_json"], seed)
        assert ended_job(server, job)["status"] == "completed"
        assert noticed_s < 3.0
        cluster.node.append(cluster.add_node(**NODE))
        eventually(lambda: up(server) == 2, PLACE_S, "the new node gets a worker")


def test_a_front_that_is_killed_leaves_its_workers_to_the_next_and_jobs_go_on(
    cluster: Any, tmp_path: Path
) -> None:
    others, costs = hosted(), str(tmp_path / "costs.json")  # other settings are loaded anew
    flags = ["--workers", "2", "--state-dir", str(tmp_path / "state"), "--cost-table", costs]
    flags += ["--worker-keep-alive", "40"]
    with fleet(cluster, "heirs", *flags) as first:
        before = hosted() - others
        assert len(before) == 2
        job = started_job(first, 3)
        eventually(lambda: first.stats()["running"] > 0, 60, "it runs")
        first.signal(signal.SIGKILL)
    with fleet(cluster, "heirs", *flags) as second:
        assert hosted() >= before  # the same processes
        assert "workers of an earlier front: 2" in second.stderr
        assert ended_job(second, job)["status"] == "completed"
        assert second.draw(seed=1).status_code == 200


def test_a_rolling_update_replaces_every_worker_and_no_request_fails(cluster: Any) -> None:
    with fleet(cluster, "update", "--workers", "2") as server:
        before = {one["worker"] for one in server.get("/health").json()["workers"]}

        def is_rolled() -> bool:
            return "rolling update: done" in server.stderr

        def draw(seed: int) -> list[int]:
            statuses = []
            while not is_rolled():
                statuses.append(server.draw(seed=seed).status_code)
            return statuses

        with ThreadPoolExecutor(3) as threads:
            drawing = [threads.submit(draw, seed) for seed in range(3)]
            server.signal(signal.SIGUSR2)
            eventually(is_rolled, 200, "all are replaced")
            statuses = [status for one in drawing for status in one.result()]
        after = {one["worker"] for one in server.get("/health").json()["workers"]}

        assert not before & after
        assert (len(after), up(server)) == (2, 2)
        assert len(statuses) > 5
        assert set(statuses) == {200}


def test_workers_come_with_the_load_and_go_without_it_and_no_request_fails(cluster: Any) -> None:
    scaling = ("--scale-up-wait", "0.3", "--scale-down-after", "3", "--max-running", "1")
    flags = ("--max-workers", "2", "--workers-per-node", "1", *scaling)
    with fleet(cluster, "scale", *flags, ready=1) as server:
        is_up = False

        def draw(seed: int) -> list[Any]:
            answers = list[Any]()
            while not is_up or not answers:
                answers.append(server.draw(seed=seed, num_inference_steps=STEPS))
            return answers

        with ThreadPoolExecutor(6) as threads:
            drawing = [threads.submit(draw, seed) for seed in range(6)]
            try:
                eventually(lambda: up(server) == 2, PLACE_S, "another worker is there")
            finally:
                is_up = True
            answers = [one.result() for one in drawing]
        held = len(hosted())
        eventually(lambda: up(server) == 1, 60, "one of them goes")
        eventually(lambda: len(hosted()) == held - 1, 20, "so does its process")

        assert {one.status_code for each in answers for one in each} == {200}
        for seed, each in enumerate(answers):
            assert is_right(each[-1].json()["data"][0]["b64_json"], seed)


def test_a_group_is_placed_on_one_node_and_goes_on_when_a_rank_dies(cluster: Any) -> None:
    with fleet(cluster, "ranks", "--context-parallel", "2", ready=1) as server:
        [worker] = server.get("/health").json()["workers"]
        assert worker["ranks"] == 2
        before = server.stats()["workers"][0]["group"]["ranks"]
        with ThreadPoolExecutor(1) as threads:
            drawing = threads.submit(server.draw, seed=4, num_inference_steps=STEPS)
            eventually(lambda: server.stats()["workers"][0]["steps"] > STEPS / 4, 60, "it runs")
            os.kill(before[1]["pid"], signal.SIGKILL)
            answer = drawing.result()
        assert answer.status_code == 200
        assert is_right(answer.json()["data"][0]["b64_json"], 4)
        after = server.stats()["workers"][0]["group"]["ranks"]
        assert not {one["pid"] for one in before} & {one["pid"] for one in after}


def test_workers_that_no_front_uses_end_by_themselves(cluster: Any) -> None:
    """Those of the tests before: each was kept for ten seconds."""
    eventually(lambda: not hosted(), 60, "all have ended")
