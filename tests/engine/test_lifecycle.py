"""Processes that die and drain; requests whose callers or time are gone."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from support.app import Grey, open_app
from support.artifacts_app import BELL, SOUND, Making
from support.endpoints import ENDPOINT, VIDEOS
from support.server_process import PATIENCE_S, Server, body, eventually, serving
from support.video_app import Filming

pytestmark = pytest.mark.timeout(150)  # starting a server may take long
ENDLESS = 1000  # steps; some 15 s where nothing else runs


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """A server that runs one request and lets one wait. The last test that uses it ends it."""
    flags = ("--max-running", "1", "--max-queue", "1", "--drain-timeout", "0.3")
    with serving(*flags) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def begin(pool: ThreadPoolExecutor, server: Server, steps: int) -> Future[httpx2.Response]:
    """Send a request and wait until it runs."""
    future = pool.submit(server.draw, num_inference_steps=steps)
    eventually(lambda: server.stats()["running"] == 1, 10, "the request runs")
    return future


def send(server: Server, **others: Any) -> socket.socket:
    """Send a request and give the open connection, to be hung up."""
    address = urlsplit(server.url)
    connection = socket.create_connection((str(address.hostname), int(address.port or 0)))
    content = json.dumps(body(**others))
    head = f"POST {ENDPOINT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode())
    return connection


def load(server: Server) -> tuple[int, int]:
    stats = server.stats()
    return stats["running"], stats["waiting"]


def refusal(answer: httpx2.Response) -> dict[str, Any]:
    told: dict[str, Any] = answer.json()["error"]
    assert told.keys() == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return told


def assert_retry_hint(answer: httpx2.Response) -> None:
    assert answer.headers["x-should-retry"] == "true"
    assert 0 < int(answer.headers["retry-after-ms"]) <= 120_000
    assert 1 <= int(answer.headers["retry-after"]) <= 120


# Requests


def test_a_client_that_hangs_up_stops_its_request(narrow: Server) -> None:
    before = narrow.stats()["steps"]

    with closing(send(narrow, num_inference_steps=ENDLESS)):
        eventually(lambda: narrow.stats()["steps"] > before, 10, "it makes steps")
        with closing(send(narrow)):
            eventually(lambda: load(narrow) == (1, 1), 10, "another waits")
        eventually(lambda: load(narrow) == (1, 0), 5, "the waiting one is given up")

    eventually(lambda: load(narrow) == (0, 0), 2, "the running one is given up")
    assert narrow.stats()["steps"] - before < ENDLESS / 2
    assert narrow.draw().status_code == 200


def test_a_full_queue_refuses_with_a_hint_and_gives_up_all_pictures_of_the_request(
    narrow: Server,
) -> None:
    with closing(send(narrow, num_inference_steps=ENDLESS)):
        eventually(lambda: load(narrow) == (1, 0), 10, "another runs")

        answer = narrow.draw(n=2, num_inference_steps=ENDLESS)  # there is one place to wait

        assert answer.status_code == 429
        told = refusal(answer)
        assert (told["code"], told["type"]) == ("queue_full", "rate_limit_error")
        assert_retry_hint(answer)
        eventually(lambda: load(narrow) == (1, 0), 5, "the picture that had a place is given up")
    eventually(lambda: load(narrow) == (0, 0), 5, "the other one is gone, too")


def test_time_that_runs_out_is_told_and_frees_the_place(narrow: Server) -> None:
    answer = narrow.draw(num_inference_steps=ENDLESS, timeout_s=0.3)

    assert answer.status_code == 504
    told = refusal(answer)
    assert (told["code"], told["type"]) == ("deadline_exceeded", "server_error")
    assert answer.headers["x-should-retry"] == "false"
    assert load(narrow) == (0, 0)


def test_a_killed_worker_is_replaced_and_its_requests_are_run_again(
    narrow: Server, pool: ThreadPoolExecutor
) -> None:
    running = begin(pool, narrow, 100)
    waiting = pool.submit(narrow.draw)
    eventually(lambda: load(narrow) == (1, 1), 10, "one runs, one waits")
    worker = narrow.worker()

    os.kill(worker, signal.SIGKILL)

    eventually(lambda: narrow.health() == 503, 3, "its death is seen")
    assert narrow.get("/health").json() == {"status": "worker_lost"}
    refused = narrow.draw()
    assert (refused.status_code, refusal(refused)["code"]) == (503, "worker_lost")
    assert_retry_hint(refused)
    assert refusal(narrow.get("/stats"))["code"] == "worker_lost"
    answers = [request.result(timeout=PATIENCE_S) for request in (running, waiting)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].json()["data"] == narrow.draw().json()["data"]  # the same picture
    assert narrow.worker() != worker
    died, ready = "the worker died (signal 9, SIGKILL: killed, as the system does", "is ready again"
    assert died in narrow.stderr
    assert "its requests: req-" in narrow.stderr
    assert ready in narrow.stderr


def test_a_request_that_outlasts_the_drain_is_told(
    narrow: Server, pool: ThreadPoolExecutor
) -> None:
    running = begin(pool, narrow, ENDLESS)

    narrow.signal()

    answer = running.result(timeout=5)
    assert (answer.status_code, refusal(answer)["code"]) == (503, "draining")
    assert narrow.wait(5) == 0


# The end


def test_a_signal_lets_the_running_finish_and_refuses_the_rest(pool: ThreadPoolExecutor) -> None:
    with serving() as server:
        running = begin(pool, server, 100)

        server.signal()

        eventually(lambda: server.health() == 503, 5, "/health says that it ends")
        refused = server.draw()
        assert (refused.status_code, refusal(refused)["code"]) == (503, "draining")
        assert_retry_hint(refused)
        assert server.get("/health").json() == {"status": "draining"}
        assert running.result(timeout=20).status_code == 200
        assert server.wait() == 0


# A client that disconnects ends what runs for it, whichever endpoint it asked


DRAW = {"prompt": "a cat"}
CHAT = {"messages": [{"role": "user", "content": "a cat"}]}


@pytest.mark.parametrize(
    ("worker", "path", "body"),
    [
        (Grey(is_slow=True), ENDPOINT, DRAW), (Grey(is_slow=True), "/sdapi/v1/txt2img", DRAW),
        (Grey(is_slow=True), "/v1/chat/completions", CHAT),
        (Grey(is_slow=True), "/", {"inputs": "a cat"}), (Filming(), f"{VIDEOS}/sync", DRAW),
        (Making(BELL, is_slow=True), SOUND, DRAW),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
async def test_a_disconnect_cancels_the_work(worker: Grey, path: str, body: Any) -> None:
    worker.is_slow = True
    async with open_app(worker) as opened:
        asking = asyncio.create_task(opened.http.post(path, json=body))
        await worker.until(lambda: worker.running == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await worker.until(lambda: worker.running == 0)
        if path.startswith(VIDEOS):
            [video] = (await opened.http.get(VIDEOS)).json()["data"]
            assert video["error"]["code"] == "cancelled"
