"""Workers on a real Ray cluster of two nodes: placed, taken over, killed with their node, replaced.

`make test-ray`; the same without Ray, by fakes: `test_remote.py`, `test_adoption.py`.
"""

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.pictures import gap, picture
from support.server_process import (
    Server,
    body,
    drawn_by_diffusers,
    eventually,
    serving,
)

pytest.importorskip("ray", reason="needs Ray: `make test-ray` installs it")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # nothing here listens beyond this machine
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
PLACE_S = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, text in QUIET.items():
            patch.setenv(name, text)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        from ray.cluster_utils import Cluster

        # the head has no room for workers: nodes come and go, and it stays
        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        both = Cluster(initialize_head=True, head_node_args=head)
        try:
            both.first, both.second = (both.add_node(**NODE) for _ in range(2))
            yield both
        finally:
            both.shutdown()


@contextmanager
def fleet(cluster: Any, name: str, *flags: str, ready: int = 2) -> Iterator[Server]:
    """A server whose workers are on the cluster; it ends, and they stay for ten seconds."""
    said = ["--ray", cluster.address, "--fleet-name", name, "--device", "cpu"]
    with serving(*said, "--worker-keep-alive", "10", *flags) as server:
        eventually(lambda: up(server) == ready, PLACE_S, f"{ready} workers are ready")
        yield server


def up(server: Server) -> int:
    return sum(one["state"] == "ready" for one in server.get("/health").json()["workers"])


def hosted() -> list[int]:
    """The processes that hold a model, of all servers."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and b"carpool.worker.process" in command(entry)
    ]


def command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:  # it ended just now
        return b""


def same(answer: Any, seed: int, steps: int) -> bool:
    mine = picture(base64.b64decode(answer.json()["data"][0]["b64_json"]))
    return gap(mine, drawn_by_diffusers("a red circle", seed, num_inference_steps=steps)) <= 1


def test_a_killed_node_loses_nothing_and_what_it_ran_goes_on_within_three_seconds(
    cluster: Any,
) -> None:
    with fleet(cluster, "death", "--workers", "2", "--workers-per-node", "1") as server:
        seeds, steps = range(8), 150
        with ThreadPoolExecutor(len(seeds)) as threads:
            drawing = [
                threads.submit(server.draw, seed=seed, num_inference_steps=steps) for seed in seeds
            ]
            eventually(lambda: server.stats()["running"] >= 4, 30, "they run")
            eventually(lambda: all(one["running"] for one in server.stats()["workers"]), 30, "both")
            job = server.client().post("/v1/jobs/images", json=body(num_inference_steps=steps))
            killed_s = time.monotonic()
            cluster.remove_node(cluster.second, allow_graceful=False)
            eventually(lambda: up(server) == 1, 10, "the front knows")
            known_s = time.monotonic() - killed_s
            answers = [one.result() for one in drawing]

        assert [one.status_code for one in answers] == [200] * len(seeds)
        assert all(same(one, seed, steps) for seed, one in zip(seeds, answers, strict=True))
        assert known_s < 3.0, known_s
        print(job.status_code, job.text[:200])
        cluster.second = cluster.add_node(**NODE)
        eventually(lambda: up(server) == 2, PLACE_S, "a node that comes gets a worker")
