"""A worker that dies or hangs is an event: the innocent are answered, the guilty is found."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from support.endpoints import ENDPOINT
from support.pictures import ALIKE, gap, picture
from support.server_process import PATIENCE_S, Server, body, eventually, serving

pytestmark = pytest.mark.timeout(400)  # workers start again and again
GUILTY = 13
STEPS = 40  # so many that the innocent are aboard when the guilty one comes


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def draw(server: Server, seed: int) -> tuple[int, dict[str, Any]]:
    with server.client(timeout=3 * PATIENCE_S) as client:
        own = {"prompt": f"a prompt that is {seed}'s alone"} if seed == GUILTY else {}
        answer = client.post(ENDPOINT, json=body(seed=seed, num_inference_steps=STEPS, **own))
        return answer.status_code, answer.json()


def seen(answer: dict[str, Any]) -> Image.Image:
    return picture(base64.b64decode(answer["data"][0]["b64_json"]))


def test_who_kills_its_workers_fails_alone_and_the_others_are_drawn(
    pool: ThreadPoolExecutor,
) -> None:
    with serving(fault=f"forward:kill:seed={GUILTY}") as server:
        first = server.worker()
        answers = {seed: pool.submit(draw, server, seed) for seed in (1, 2, 3)}
        eventually(lambda: server.stats()["running"] == 3, 30, "the innocent are aboard")
        answers[GUILTY] = pool.submit(draw, server, GUILTY)

        told = {seed: one.result() for seed, one in answers.items()}

        status, refused = told.pop(GUILTY)
        assert status == 500
        assert "several workers that died" in str(refused["error"])
        for seed, (status, drawn) in told.items():
            assert status == 200
            eventually(lambda: server.health() == 200, PATIENCE_S, "a worker is ready")
            alone = draw(server, seed)[1]
            assert gap(seen(drawn), seen(alone)) <= ALIKE
        assert server.worker() != first


def test_a_worker_that_hangs_is_killed_and_replaced(pool: ThreadPoolExecutor) -> None:
    fault = f"forward:hang:seed={GUILTY}"
    with serving("--worker-timeout", "1", "--drain-timeout", "1", fault=fault) as server:
        assert draw(server, 1)[0] == 200  # so it is known what forwards take
        first = server.worker()
        hanging = pool.submit(draw, server, GUILTY)

        eventually(lambda: server.health() == 503, 30, "it is seen that it hangs")
        eventually(lambda: server.health() == 200, PATIENCE_S, "another is ready")

        assert server.worker() != first
        assert "it is killed" in server.stderr
        hanging.cancel()
