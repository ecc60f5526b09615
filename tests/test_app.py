"""The HTTP application with no worker behind it: keys, and failures that nobody foresaw."""

import asyncio
from typing import Any

import httpx2
import pytest

from carpool.config import EngineSettings, ServeSettings
from carpool.server.app import create_app
from carpool.supervise import Supervisor

KEYS = ("first-key", "zweiter-schlüssel")
KEYED = ServeSettings(api_key=KEYS)
ENDPOINT = "/v1/images/generations"


def ask(settings: ServeSettings, path: str, authorization: str | None = None) -> httpx2.Response:
    """Ask the application itself; an exception that leaves it fails the test."""
    app = create_app(Supervisor("none", EngineSettings()), settings)
    headers = [(b"authorization", authorization.encode())] if authorization is not None else []

    async def talk() -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            if path == ENDPOINT:
                return await client.post(path, json={"prompt": "a"}, headers=headers)
            return await client.get(path, headers=headers)

    return asyncio.run(talk())


def error(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.headers["x-request-id"].startswith("req-")
    told: dict[str, Any] = answer.json()["error"]
    assert told.keys() == {"message", "type", "param", "code"}
    return told


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", [ENDPOINT, "/v1/models", "/v1/models/x", "/stats"])
def test_each_key_opens(path: str, key: str) -> None:
    answer = ask(KEYED, path, f"Bearer {key}")

    assert (answer.status_code, error(answer)["code"]) == (503, "starting")
    assert answer.headers["x-should-retry"] == "true"
    assert int(answer.headers["retry-after-ms"]) > 0


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer first-keyx", "Bearer first-ke",
     "first-key", "Basic first-key", "Bearer first-key,zweiter-schlüssel"],
)  # fmt: skip
@pytest.mark.parametrize(
    "path", [ENDPOINT, "/v1/models", "/v1/models/x", "/stats", "/metrics", "/v1/requests/x"]
)
def test_without_a_right_key_nothing_opens(path: str, authorization: str | None) -> None:
    answer = ask(KEYED, path, authorization)

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    told = error(answer)
    assert (told["code"], told["type"]) == ("invalid_api_key", "invalid_request_error")


def test_without_keys_any_token_will_do() -> None:
    for authorization in (None, "Bearer none"):
        assert ask(ServeSettings(), "/v1/models", authorization).status_code == 503


def test_while_the_model_loads_only_life_is_well() -> None:
    assert ask(KEYED, "/livez").status_code == 200
    assert ask(KEYED, "/version").status_code == 200
    health = ask(KEYED, "/health")
    assert (health.status_code, health.json()) == (503, {"status": "starting"})


def test_an_unforeseen_failure_has_the_shape_and_the_id_and_keeps_its_secrets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Supervisor) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(Supervisor, "check_open", fail)

    answer = ask(ServeSettings(), "/v1/models")

    assert (answer.status_code, error(answer)["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert "secret" in caplog.text
