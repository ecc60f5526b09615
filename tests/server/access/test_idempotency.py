"""The same request again, with the same key, costs nothing; another one with it is refused."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from carpool.errors import IdempotencyMismatch, InvalidValue, PipelineFailed
from carpool.server.access.idempotency import IdempotencyCache, digest_of
from support.fake_hosts import settle


class Harness:
    """Answers that count how often they were worked for, with a clock of the test's own."""

    def __init__(self, **options: Any) -> None:
        self.now_s, self.worked, self.given_up = 0.0, 0, 0
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.answers: IdempotencyCache[str] = IdempotencyCache(len, lambda: self.now_s, **options)

    async def work(self) -> str:
        self.worked += 1
        number = self.worked
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.error is not None:
            raise self.error
        return f"answer {number}"

    def ask(
        self, key: str | None = "k", body: str = "a", owner: str = "me"
    ) -> Coroutine[Any, Any, str]:
        return self.answers.once(owner, key, digest_of("/path", body), self.work)


async def test_the_same_request_again_gets_the_same_answer() -> None:
    harness = Harness()
    harness.go.set()

    assert [await harness.ask() for _ in range(3)] == ["answer 1"] * 3


async def test_requests_that_come_meanwhile_wait_for_the_same_answer() -> None:
    harness = Harness()
    tasks = [asyncio.create_task(harness.ask()) for _ in range(3)]
    await settle()

    harness.go.set()

    assert await asyncio.gather(*tasks) == ["answer 1"] * 3


async def test_without_a_key_and_for_others_everybody_is_worked_for() -> None:
    harness = Harness()
    harness.go.set()

    asked = [(None, "me"), (None, "me"), ("k", "me"), ("k", "you"), ("l", "me")]
    answers = [await harness.ask(key, owner=owner) for key, owner in asked]

    assert len(set(answers)) == 5


@pytest.mark.parametrize("is_running", [True, False])
async def test_another_body_with_the_same_key_is_refused(is_running: bool) -> None:
    harness = Harness()
    first = asyncio.create_task(harness.ask(body="a"))
    await settle()
    if not is_running:
        harness.go.set()
        await first

    with pytest.raises(IdempotencyMismatch, match="'k' came before with another body"):
        await harness.ask(body="b")

    harness.go.set()
    assert await first == "answer 1"
    assert harness.worked == 1


async def test_a_failure_is_told_to_all_who_wait_and_tried_anew_by_the_next() -> None:
    harness = Harness()
    tasks = [asyncio.create_task(harness.ask()) for _ in range(2)]
    await settle()
    harness.error = PipelineFailed("no")
    harness.go.set()
    for task in tasks:
        with pytest.raises(PipelineFailed):
            await task

    harness.error = None

    assert await harness.ask() == "answer 2"


async def test_work_goes_on_while_anybody_waits_and_not_longer() -> None:
    harness = Harness()
    first, second = (asyncio.create_task(harness.ask()) for _ in range(2))
    await settle()

    first.cancel()
    await settle()
    assert harness.given_up == 0
    second.cancel()
    await settle()
    assert harness.given_up == 1

    harness.go.set()
    assert await harness.ask() == "answer 2"


async def test_the_oldest_answers_make_room() -> None:
    harness = Harness(most_bytes=20)  # two answers of 8
    harness.go.set()
    for key in ("a", "b", "c"):
        await harness.ask(key)

    assert await harness.ask("c") == "answer 3"
    assert await harness.ask("b") == "answer 2"
    assert await harness.ask("a") == "answer 4"


async def test_an_answer_is_kept_for_a_while_only() -> None:
    harness = Harness(kept_s=60)
    harness.go.set()
    await harness.ask()

    harness.now_s = 59
    assert await harness.ask() == "answer 1"
    harness.now_s = 61
    assert await harness.ask(body="b") == "answer 2"


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    from fastapi import Request

    from carpool.server.access.idempotency import key_of

    headers = [(b"idempotency-key", key.encode())]
    with pytest.raises(InvalidValue, match="1 to 255 printable characters"):
        key_of(Request({"type": "http", "headers": headers}))
    assert key_of(Request({"type": "http", "headers": []})) is None


def test_the_order_of_a_body_does_not_matter_and_its_values_do() -> None:
    assert digest_of("/p", {"a": 1, "b": 2}) == digest_of("/p", {"b": 2, "a": 1})
    assert len({digest_of("/p", {"a": 1}), digest_of("/q", {"a": 1}), digest_of("/p", {})}) == 3
