"""Real workers: what runs on one that is to end goes on at another one."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.endpoints import ENDPOINT
from support.server_process import PATIENCE_S, Server, body, eventually, serving

STEPS = 400


def draw(server: Server, seed: int) -> str:
    with server.client(timeout=3 * PATIENCE_S) as client:
        sent = body(num_inference_steps=STEPS, seed=seed)
        answer = client.post(ENDPOINT, json=sent).raise_for_status()
        return str(answer.json()["data"][0]["b64_json"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rolling_update_moves_what_runs_and_every_picture_is_the_same() -> None:
    flags = ("--workers", "2", "--numerics", "exact", "--state-dir", "none")
    with serving(*flags) as server, ThreadPoolExecutor(8) as pool:
        alone = {seed: draw(server, seed) for seed in range(2)}

        def are_new() -> bool:
            return {one["worker"] for one in server.get("/health").json()["workers"]} == {2, 3}

        os.kill(server.process.pid, signal.SIGUSR2)
        while not are_new():
            drawn = [pool.submit(draw, server, seed) for seed in range(2) for _ in range(3)]
            for number, one in enumerate(drawn):
                assert one.result() == alone[number // 3]
        assert server.stats()["moves"]["drain"] > 0
        eventually(lambda: server.stats()["running"] == 0, 30, "nothing is left")
