"""Limits of one API key: a bucket of requests a minute, and requests unanswered at once."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.config import EngineSettings, ServeSettings
from carpool.errors import InvalidAPIKey, RateLimited, SettingRejected
from carpool.server.app import create_app
from carpool.server.keys import Keyring, parse
from carpool.server.limits import Limits
from carpool.supervise import Supervisor

ENDPOINT = "/v1/images/generations"


class Clients:
    """Limits under a clock of the test's own."""

    def __init__(self, requests_per_minute: int | None, max_in_flight: int | None) -> None:
        self.now_s = 0.0
        self.limits = Limits(requests_per_minute, max_in_flight, lambda: self.now_s)

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


def test_a_burst_of_a_minute_is_let_in_and_then_one_at_a_time() -> None:
    clients = Clients(30, None)

    answers = [clients.ask() for _ in range(31)]

    assert answers == [None] * 30 + [2.0]
    clients.now_s += 2.0
    assert (clients.ask(), clients.ask()) == (None, 2.0)


def test_one_key_does_not_use_up_another_ones() -> None:
    clients = Clients(1, None)

    assert [clients.ask(key) for key in ("a", "b", "a", "b")] == [None, None, 60.0, 60.0]


@given(
    st.integers(1, 100),
    st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=60),
)
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


def test_requests_that_are_unanswered_keep_others_out_and_a_failed_one_does_not() -> None:
    async def go() -> None:
        limits = Limits(None, 2, lambda: 0.0)
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

    asyncio.run(go())


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


def test_a_refused_request_uses_nothing_up() -> None:
    clients = Clients(60, None)
    for _ in range(100):
        clients.ask()

    clients.now_s += 1.0

    assert clients.ask() is None


def asked(settings: ServeSettings, times: int, **headers: str) -> list[httpx2.Response]:
    app = create_app(Supervisor("none", EngineSettings()), settings)

    async def talk() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://test", headers=headers
        ) as client:
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


def test_no_answer_allows_other_origins() -> None:
    [answer] = asked(ServeSettings(), 1, origin="https://elsewhere.example")

    assert not [name for name in answer.headers if name.startswith("access-control")]


# Keys


@pytest.mark.parametrize(
    ("entry", "name", "key"),
    [
        ("secret", "key-1", b"secret"),
        ("mobile=secret", "mobile", b"secret"),
        ("a.b-c_1=x=y", "a.b-c_1", b"x=y"),
        ("c2VjcmV0cw==", "key-1", b"c2VjcmV0cw=="),  # base64 keeps its padding
        ("1st=secret", "key-1", b"1st=secret"),  # not a name
        ("=secret", "key-1", b"=secret"),
        ("schlüssel=ü", "key-1", "schlüssel=ü".encode()),
    ],
)
def test_a_key_may_have_a_name(entry: str, name: str, key: bytes) -> None:
    assert parse([entry]) == {name: key}


def test_two_keys_of_one_name_are_refused() -> None:
    with pytest.raises(SettingRejected, match="two keys are called 'a'"):
        parse(["a=1", "a=2"])


def test_a_file_of_keys_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nmobile=one\n")
    keys = Keyring(["desk=two"], str(file))
    assert (keys.name_of(b"one"), keys.name_of(b"two")) == ("mobile", "desk")
    owner = keys.owner("mobile")

    file.write_text("phone=one\nnew=three\n")
    assert keys.read() == 3
    assert (keys.name_of(b"one"), keys.name_of(b"three")) == ("phone", "new")
    assert keys.owner("phone") == owner  # what it may see stays with the key

    file.unlink()
    with pytest.raises(SettingRejected, match="cannot be read"):
        keys.read()
    assert keys.name_of(b"three") == "new"


def test_an_empty_file_of_keys_lets_nobody_in(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")

    with pytest.raises(InvalidAPIKey):
        Keyring([], str(file)).name_of(b"")
