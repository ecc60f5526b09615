"""Limits of one API key: a bucket of requests a minute, and what is open at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.config import ServeSettings
from carpool.errors import InvalidAPIKey, RateLimited, SettingRejected
from carpool.jobs.runner import Runner
from carpool.server.access.keys import Keyring, parse_keys
from carpool.server.access.limits import RateLimiter
from carpool.server.app import create_app
from support.app import Grey, Lone, client_of, fleet_of, idle_jobs, open_app
from support.endpoints import ENDPOINT


class Clients:
    """Limits under a clock of the test's own."""

    def __init__(self, requests_per_minute: int | None, max_in_flight: int | None) -> None:
        self.now_s = 0.0
        self.limits = RateLimiter(requests_per_minute, max_in_flight, lambda: self.now_s)

    def ask(self, key: str = "a", takes_s: float = 0.0) -> float | None:
        """Ask and be answered; gives when to come again if that is refused."""

        async def one() -> float | None:
            try:
                async with self.limits.hold(key):
                    self.now_s += takes_s
            except RateLimited as error:
                return error.retry_after_s
            return None

        return asyncio.run(one())


def test_a_burst_of_a_minute_is_let_in_for_each_key_and_then_one_at_a_time() -> None:
    clients = Clients(30, None)

    answers = [clients.ask() for _ in range(100)]  # a refused one uses nothing up

    assert answers == [None] * 30 + [2.0] * 70
    clients.now_s += 2.0
    assert (clients.ask(), clients.ask()) == (None, 2.0)
    assert [clients.ask("b") for _ in range(30)] == [None] * 30


@given(st.integers(1, 100), st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=60))
def test_a_minute_never_sees_more_than_twice_the_limit_and_a_hint_is_kept(
    per_minute: int, gaps_s: list[float]
) -> None:
    clients, let_in_s = Clients(per_minute, None), list[float]()
    for gap_s in gaps_s:
        clients.now_s += gap_s
        again_s = clients.ask()
        if again_s is None:
            let_in_s.append(clients.now_s)
        else:
            assert 0.1 <= again_s <= 120
            clients.now_s += again_s
            assert clients.ask() is None
            let_in_s.append(clients.now_s)

    for first_s in let_in_s:
        assert sum(first_s <= at_s < first_s + 60 for at_s in let_in_s) <= 2 * per_minute


async def test_requests_that_are_unanswered_keep_others_out_and_a_failed_one_does_not() -> None:
    limits = RateLimiter(None, 2, lambda: 0.0)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(limits.hold("a"))
        with pytest.raises(ZeroDivisionError):
            async with limits.hold("a"):
                raise ZeroDivisionError
        await stack.enter_async_context(limits.hold("a"))
        with pytest.raises(RateLimited, match=r"2 requests of API key 'a' are unanswered"):
            await stack.enter_async_context(limits.hold("a"))
        await stack.enter_async_context(limits.hold("b"))
    await stack.enter_async_context(limits.hold("a"))


def test_the_hint_of_a_full_key_follows_how_long_its_requests_take() -> None:
    clients = Clients(None, 1)
    for _ in range(50):
        clients.ask(takes_s=20)

    async def twice() -> None:
        async with clients.limits.hold("a"), clients.limits.hold("a"):
            raise AssertionError("the second is let in")

    with pytest.raises(RateLimited) as refused:
        asyncio.run(twice())

    assert refused.value.retry_after_s == pytest.approx(20, rel=0.01)


async def test_a_place_is_held_against_other_requests_and_jobs_until_it_is_left() -> None:
    limits = RateLimiter(None, 3, lambda: 0.0)
    async with limits.hold("a") as mine, limits.hold("a") as other:
        mine.check(jobs=1)
        with pytest.raises(RateLimited, match=r"1 other requests of API key 'a' are unan.* 2 jobs"):
            mine.check(jobs=2)
        assert other.release()
        assert not other.release()
        mine.check(jobs=2)
        async with limits.hold("a"), limits.hold("a"):
            with pytest.raises(RateLimited) as refused:
                other.check(jobs=0)
    assert refused.value.retry_after_s == 10
    async with limits.hold("a"), limits.hold("a"), limits.hold("a"):
        """All three places are free again."""


async def test_without_a_limit_a_place_is_held_against_nothing() -> None:
    async with RateLimiter(None, None, lambda: 0.0).hold("a") as place:
        place.check(jobs=1000)


# Over HTTP


@asynccontextmanager
async def limited_app(
    worker: Grey | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, Runner]]:
    """An application with jobs, which nobody runs; its limit is two."""
    limits: Any = {"max_in_flight_per_key": 2, **settings}
    async with open_app(worker or Grey(), runs=False, **limits) as opened:
        yield opened.http, opened.runner


async def submit(client: httpx2.AsyncClient, key: str = "", **more: Any) -> httpx2.Response:
    headers = {"idempotency-key": key} if key else {}
    return await client.post(ENDPOINT, json={"prompt": "a", **more}, headers=headers)


async def test_open_jobs_count_until_they_end_and_keep_requests_out_too() -> None:
    async with limited_app() as (client, runner):
        jobs = [await submit(client, background_job=True) for _ in range(3)]
        assert [one.status_code for one in jobs] == [202, 202, 429]
        told = jobs[2].json()["error"]
        assert (told["type"], told["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "2 jobs are open: the limit for both together is 2" in told["message"]
        assert jobs[2].headers["retry-after"] == "10"
        for is_streamed in (False, True):
            assert (await submit(client, stream=is_streamed)).status_code == 429

        await runner.cancel(jobs[0].json()["id"])

        assert (await submit(client)).status_code == 200
        assert (await submit(client, stream=True)).status_code == 200
        assert (await submit(client, background_job=True)).status_code == 202
        assert (await submit(client)).status_code == 429


async def test_a_job_that_is_sent_again_is_found_although_its_key_is_full() -> None:
    async with limited_app() as (client, _):
        answers = [await submit(client, key, background_job=True) for key in ("a", "b", "a", "c")]
        assert [one.status_code for one in answers] == [202, 202, 202, 429]
        assert answers[0].json()["id"] == answers[2].json()["id"]


@pytest.mark.parametrize("sent", [2, 5])
async def test_of_jobs_that_come_at_once_as_many_are_taken_as_may_be_open(sent: int) -> None:
    async with limited_app() as (client, runner):
        answers = await asyncio.gather(*(submit(client, background_job=True) for _ in range(sent)))
        taken = [one.status_code for one in answers].count(202)
        assert taken == sum((await runner.count_open()).values()) == 2


async def test_a_request_that_is_unanswered_leaves_room_for_one_job_only() -> None:
    worker = Grey(is_slow=True)

    async with limited_app(worker) as (client, _):
        drawing = asyncio.create_task(submit(client))
        await worker.until(lambda: worker.running == 1)
        jobs = [await submit(client, background_job=True) for _ in range(2)]
        assert [one.status_code for one in jobs] == [202, 429]
        assert "1 other requests of all clients together" in jobs[1].text
        drawing.cancel()
        await asyncio.wait([drawing])


async def test_jobs_of_another_key_do_not_count() -> None:
    async with limited_app(api_key=("one", "two")) as (client, _):
        answers = []
        for key in ("one", "one", "two", "one"):
            client.headers["authorization"] = f"Bearer {key}"
            answers.append((await submit(client, background_job=True)).status_code)
        assert answers == [202, 202, 202, 429]


def asked(settings: ServeSettings, times: int, **headers: str) -> list[httpx2.Response]:
    app = create_app(fleet_of(Lone()), settings, idle_jobs())

    async def talk() -> list[httpx2.Response]:
        async with client_of(app, headers=headers) as client:
            return [await client.post(ENDPOINT, json={"prompt": "a"}) for _ in range(times)]

    return asyncio.run(talk())


def test_over_http_the_one_too_many_is_told_as_openai_tells_it() -> None:
    answers = asked(ServeSettings(requests_per_minute=2), 3)

    assert [answer.status_code for answer in answers] == [503, 503, 429]  # the model loads
    told = answers[2].json()["error"]
    assert (told["type"], told["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 29_000 <= int(answers[2].headers["retry-after-ms"]) <= 30_000
    assert answers[2].headers["x-should-retry"] == "true"
    assert answers[2].headers["x-request-id"]


def test_without_a_key_nothing_is_counted() -> None:
    settings = ServeSettings(requests_per_minute=1, api_key=("mobile=secret",))

    assert [one.status_code for one in asked(settings, 3, authorization="Bearer no")] == [401] * 3
    answers = asked(settings, 2, authorization="Bearer secret")
    assert [one.status_code for one in answers] == [503, 429]
    assert "'mobile'" in answers[1].text
    assert "secret" not in answers[1].text


# Keys


@pytest.mark.parametrize(
    ("entry", "name", "key"),
    [
        ("secret", "key-2bb80d53", b"secret"),
        ("mobile=secret", "mobile", b"secret"),
        ("a.b-c_1=x=y", "a.b-c_1", b"x=y"),
        ("c2VjcmV0cw==", "key-8b807901", b"c2VjcmV0cw=="),  # base64 keeps its padding
        ("1st=secret", "key-9771cc29", b"1st=secret"),  # not a name
        ("=secret", "key-3eb96dd2", b"=secret"),
        ("schlüssel=ü", "key-d6ad3425", "schlüssel=ü".encode()),
    ],
)
def test_a_key_may_have_a_name(entry: str, name: str, key: bytes) -> None:
    assert parse_keys([entry]) == {name: key}


def test_a_file_of_keys_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nmobile=one\n")
    keys = Keyring(["desk=two"], str(file))
    assert (keys.client_of(b"one").key, keys.client_of(b"two").key) == ("mobile", "desk")
    owner = keys.client_of(b"one").owner

    file.write_text("phone=one\nnew=three\n")
    assert keys.read() == 3
    assert (keys.client_of(b"one").key, keys.client_of(b"three").key) == ("phone", "new")
    assert keys.client_of(b"one").owner == owner  # what it may see stays with the key

    file.unlink()
    with pytest.raises(SettingRejected, match="cannot be read"):
        keys.read()
    assert keys.client_of(b"three").key == "new"


def test_an_empty_file_of_keys_lets_nobody_in(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")

    with pytest.raises(InvalidAPIKey):
        Keyring([], str(file)).client_of(b"")
