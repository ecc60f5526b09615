"""Journals in the front, and a real worker that dies: requests go on at their next step."""

import math
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from carpool.types import JournalEntry
from carpool.worker import journals
from carpool.worker.journals import Journals
from carpool.worker.update_sender import EVERY_S
from support.endpoints import ENDPOINT
from support.server_process import PATIENCE_S, Server, body, eventually, serving

STEPS = 60
KILLED_AT = 30


def entry(number: int, size: int = 100) -> JournalEntry:
    return JournalEntry(number, b"mark", bytes(size))


def numbers(kept: Journals, request_id: str) -> list[int]:
    return [one.number for one in kept.entries(request_id)]


def test_entries_are_kept_in_order_and_a_request_that_starts_over_replaces_its_own() -> None:
    kept = Journals()
    kept.open("one")
    for number in (1, 2, 4, 5):
        kept.add("one", entry(number))
    assert numbers(kept, "one") == [1, 2, 4, 5]
    kept.add("one", entry(4))
    assert numbers(kept, "one") == [1, 2, 4]
    kept.add("one", entry(1))
    assert numbers(kept, "one") == [1]
    kept.clear("one")
    assert numbers(kept, "one") == []
    kept.add("one", entry(1))
    kept.close("one")
    kept.add("one", entry(2))  # it came too late
    assert (len(kept), kept.bytes) == (0, 0)


def test_no_more_bytes_are_kept_than_may_be_and_the_oldest_requests_go_first() -> None:
    kept = Journals(most_bytes=10 * (100 + journals._OVERHEAD_BYTES))
    for name in ("old", "new", "newest"):
        kept.open(name)
        for number in range(1, 5):
            kept.add(name, entry(number))
    assert numbers(kept, "old") == []
    assert numbers(kept, "new") == numbers(kept, "newest") == [1, 2, 3, 4]
    assert [kept.is_whole(name) for name in ("old", "new", "newest")] == [False, True, True]
    kept.add("old", entry(5))  # the steps before it are made again, this one is not
    assert numbers(kept, "old") == [5]
    kept.add("newest", entry(5, size=100_000))  # more than all may have
    assert kept.bytes == 0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def draw(server: Server, **others: Any) -> str:
    with server.client(timeout=3 * PATIENCE_S) as client:
        sent = body(num_inference_steps=STEPS, **others)
        answer = client.post(ENDPOINT, json=sent).raise_for_status().json()
        return str(answer["data"][0]["b64_json"])


@pytest.mark.timeout(300)
def test_requests_of_a_worker_that_is_killed_go_on_at_their_next_step(
    pool: ThreadPoolExecutor,
) -> None:
    with serving("--numerics", "exact", "--state-dir", "none") as server:
        alone = [draw(server, seed=seed) for seed in (1, 2)]
        first, before = server.worker(), server.stats()["steps"]
        began_s = time.monotonic()
        answers = [pool.submit(draw, server, seed=seed) for seed in (1, 2)]
        reached = before + 2 * KILLED_AT
        eventually(lambda: server.stats()["steps"] >= reached, 60, "they are half way")
        os.kill(first, signal.SIGKILL)
        step_s = (time.monotonic() - began_s) / KILLED_AT

        assert [one.result() for one in answers] == alone
        assert server.worker() != first
        # one step each may have been under way, and those of `EVERY_S` not sent: some are twice as
        # fast as the others
        lost = 1 + math.ceil(2 * EVERY_S / step_s)
        assert server.stats()["steps"] <= 2 * (STEPS - KILLED_AT + lost)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_journals_they_run_again(pool: ThreadPoolExecutor) -> None:
    with serving("--numerics", "exact", "--state-dir", "none", "--journal", "off") as server:
        alone = draw(server)
        first, before = server.worker(), server.stats()["steps"]
        answer = pool.submit(draw, server)
        eventually(lambda: server.stats()["steps"] >= before + KILLED_AT, 60, "it is half way")
        os.kill(first, signal.SIGKILL)

        assert answer.result() == alone
        assert server.stats()["steps"] == STEPS
