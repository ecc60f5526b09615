"""The HTTP application with no worker behind it: keys, and failures that nobody foresaw."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from carpool.config import ServeSettings
from carpool.server.app import create_app
from carpool.server.bodies import schema
from carpool.server.compat.automatic1111.routes import EMPTY_LISTS
from carpool.server.routes import images, jobs, videos
from carpool.server.routes.videos import UNSUPPORTED
from carpool.worker.supervisor import Supervisor
from support import app as in_process
from support.app import Lone, answer_of, fleet_of, idle_jobs, open_app

KEYS = ("first-key", "zweiter-schlüssel")
KEYED = ServeSettings(api_key=KEYS)
ENDPOINT = "/v1/images/generations"


@cache
def _app(settings: ServeSettings) -> FastAPI:
    return create_app(fleet_of(Lone()), settings, idle_jobs())


def ask(settings: ServeSettings, path: str, authorization: str | None = None) -> httpx2.Response:
    headers = [(b"authorization", authorization.encode())] if authorization is not None else []
    if path == ENDPOINT:
        return answer_of(_app(settings), "POST", path, json={"prompt": "a"}, headers=headers)
    return answer_of(_app(settings), "GET", path, headers=headers)


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


@pytest.mark.parametrize(
    "path",
    [ENDPOINT, "/v1/images/edits", "/v1/images/variations", "/v1/videos", "/v1/videos/x/remix",
     "/v1/jobs/x/cancel"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=b", ""])
def test_without_a_right_key_nothing_of_a_body_is_read(path: str, kind: str) -> None:
    limits: Any = {"api_key": KEYS, "max_body_bytes": 5000, "max_upload_bytes": 5000}

    answer = asyncio.run(sent_to_all_routes(path, b"{" * 9000, kind, **limits))

    assert (answer.status_code, error(answer)["code"]) == (401, "invalid_api_key")


OPEN = {"/health", "/health_generate", "/livez", "/version", "/docs", "/openapi.json"}
OPEN |= {"/v1/files/{file_id}", "/v1/files/{job_id}/{name}"}
"""All that is answered without a key: docs/deployment.md names them."""


async def test_whatever_is_not_open_wants_a_key_under_the_root_path_and_without_it() -> None:
    answers: dict[str, int] = {}

    keyed: Any = {"api_key": KEYS, "root_path": "/draw"}
    async with open_app(in_process.Grey(), runs=False, **keyed) as opened:
        paths = (await opened.http.get("/openapi.json")).json()["paths"]
        asked = {(path, method) for path, item in paths.items() for method in item}
        asked |= {(f"/v1{path}", method.lower()) for path, method in UNSUPPORTED.items()}
        for path, method in asked | {("/docs", "get"), ("/openapi.json", "get")}:
            for prefix in ("", "/draw"):
                url = prefix + re.sub(r"{\w+}", "x", path)
                answer = await opened.http.request(method, url)
                answers[f"{method} {prefix} {path}"] = answer.status_code

    assert {name.split()[-1] for name, status in answers.items() if status != 401} == OPEN
    assert len(answers) > 40
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    assert all(f"`{path.split('{')[0]}" in page for path in OPEN)


def test_the_proxys_rule_in_the_docs_covers_the_root_path_too() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    [rule] = re.findall(r"location ~ (\S+) \{ deny all; \}", page)

    for path in ("/stats", "/metrics", "/draw/stats", "/draw/metrics"):
        assert re.search(rule, path)
    assert not re.search(rule, "/v1/models")


@pytest.mark.parametrize("path", ["/stats/", "/v1/models/", f"{ENDPOINT}/", "/health/", "/docs/"])
@pytest.mark.parametrize("settings", [KEYED, ServeSettings()], ids=["keys", "no keys"])
def test_nobody_is_sent_elsewhere(path: str, settings: ServeSettings) -> None:
    answer = ask(settings, path)

    assert answer.status_code in (401, 404, 503)
    assert "location" not in answer.headers


@pytest.mark.parametrize("state", ["starting", "worker_lost"])
def test_a_model_that_was_loaded_once_is_known_whatever_became_of_its_worker(state: Any) -> None:
    worker = in_process.Grey()
    worker._state = state

    listed = in_process.ask("", "/v1/models", worker=worker, method="GET")
    found = in_process.ask("", "/v1/models/grey", worker=worker, method="GET")

    assert [one["id"] for one in listed.json()["data"]] == [found.json()["id"]] == ["grey"]
    assert in_process.ask('{"prompt": "a"}', worker=worker).status_code == 503


def test_the_model_goes_by_the_name_it_was_given() -> None:
    for path in ("/v1/models", "/v1/models/our/model"):
        told = in_process.ask("", path, method="GET", served_model_name="our/model").json()
        assert told.get("data", [told])[0]["id"] == "our/model"
    for name in ("our/model", "grey", None):  # its own id, too, as the peers' clients send it
        content = json.dumps({"prompt": "a", "model": name})
        assert in_process.ask(content, served_model_name="our/model").json()["model"] == "our/model"
    other = in_process.ask('{"prompt": "a", "model": "sdxl"}', served_model_name="our/model")
    assert in_process.refusal(other)["code"] == "model_not_found"


@pytest.mark.parametrize("is_announced", [True, False])
@pytest.mark.parametrize(
    ("path", "flag"), [(ENDPOINT, "--max-body-bytes"), ("/v1/videos", "--max-upload-bytes")]
)
def test_a_body_that_is_too_large_is_told_the_limit_and_who_sets_it(
    path: str, flag: str, is_announced: bool
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield bytes(9000)

    content: Any = bytes(9000) if is_announced else pieces()
    limits: Any = {"max_body_bytes": 5000, "max_upload_bytes": 5000}

    answer = asyncio.run(sent_to_all_routes(path, content, "application/json", **limits))

    assert (answer.status_code, error(answer)["code"]) == (413, "body_too_large")
    seen = "9000" if is_announced else "more than 5000"
    rule = f"the body has {seen} bytes: at most 5000 ({flag})"
    assert answer.json()["error"]["message"] == rule


async def sent_to_all_routes(
    path: str, content: Any, kind: str, **settings: Any
) -> httpx2.Response:
    async with open_app(in_process.Grey(), runs=False, **settings) as opened:
        return await opened.http.post(path, content=content, headers={"content-type": kind})


def test_without_keys_any_token_will_do() -> None:
    for authorization in (None, "Bearer none"):
        assert ask(ServeSettings(), "/v1/models", authorization).status_code == 503


def test_while_the_model_loads_only_life_is_well() -> None:
    assert ask(KEYED, "/livez").status_code == 200
    assert "carpool" in ask(KEYED, "/version").json()
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


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [
        (b"abc-1.X:2_3", True), (b"x" * 128, True), (b"x" * 129, False), (b"two words", False),
        (b"\xc3\xa9", False), (b"", False),
    ],
)  # fmt: skip
def test_the_clients_own_request_id_is_kept_if_it_is_sane(sent: bytes, is_kept: bool) -> None:
    answer = in_process.ask(b"", "/health", method="GET", headers={b"x-request-id": sent})

    [got] = answer.headers.get_list("x-request-id")
    assert (got == sent.decode()) if is_kept else got.startswith("req-")


def test_the_document_has_every_route() -> None:
    paths = {ENDPOINT, "/v1/models", "/v1/models/{model}", "/health", "/livez", "/version"}
    paths |= {"/stats", "/metrics", "/v1/requests/{request_id}", "/v1/files/{file_id}"}
    paths |= {"/v1/files/{job_id}/{name}", "/sdapi/v1/embeddings"}
    paths |= {"/v1/images/edits", "/v1/images/variations", "/v1/jobs", "/v1/jobs/{job_id}"}
    paths |= {"/v1/jobs/{job_id}/cancel", "/v1/jobs/{job_id}/files/{name}", "/v1/videos"}
    paths |= {f"/v1/videos/{{video_id}}{more}" for more in ("", "/content", "/remix")}
    paths |= {f"/v1/meshes{more}" for more in ("", "/{mesh_id}", "/{mesh_id}/content")}
    paths |= {"/v1/audio/generations"}
    paths |= {"/", "/v1/chat/completions", "/v1/videos/sync", "/v1/model_info", "/model_info"}
    paths |= {"/server_info", "/health_generate", "/v1/events", "/v1/estimates"}
    paths |= {f"/v1/{name}" for name in ("set_lora", "list_loras", "unmerge_lora_weights")}
    paths |= {f"/sdapi/v1/refresh-{what}" for what in ("loras", "checkpoints")}
    names = "txt2img img2img progress interrupt skip options sd-models samplers schedulers loras"
    paths |= {f"/sdapi/v1/{name}" for name in [*names.split(), *EMPTY_LISTS]}

    assert in_process.shared_app().openapi()["paths"].keys() == paths


def test_the_document_has_every_error_of_a_path_and_a_start_makes_no_validators_of_them() -> None:
    document = in_process.shared_app().openapi()
    answers = document["paths"][ENDPOINT]["post"]["responses"]
    said = {status: one["content"]["application/json"]["schema"] for status, one in answers.items()}
    for status in ("400", "401", "404", "413", "429", "500", "503", "504"):
        assert said[status] == {"$ref": "#/components/schemas/Error"}
    assert "error" in document["components"]["schemas"]["Error"]["properties"]
    required = document["components"]["schemas"]["ErrorBody"]["required"]
    assert set(required) == {"message", "type", "param", "code"}

    fields = [
        field.field_info.annotation
        for router in (images.router, jobs.router, videos.router)
        for route in router.routes
        if isinstance(route, APIRoute)
        for field in route.response_fields.values()
    ]
    assert fields.count(schema.Error) <= 2  # downloads: these bring the schema in


@pytest.mark.parametrize(
    ("path", "param", "says"),
    [
        ("/v1/jobs?limt=3", "limt", "did you mean 'limit'?"),
        ("/v1/jobs?limit=3&limit=4", "limit", "given twice"),
        ("/v1/models?limit=3", "limit", "no query parameter"),
        ("/v1/models/grey?x", "x", "no query parameter"),
        ("/v1/events?second=0", "second", "did you mean 'seconds'?"),
    ],
)
def test_an_unknown_or_repeated_query_parameter_is_refused_by_name(
    path: str, param: str, says: str
) -> None:
    error = in_process.refusal(in_process.ask(b"", path, method="GET"))

    assert (error["code"] == "invalid_value") is (says == "given twice")
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/image/generations", "/v1/images/generations"), ("/v1/model", "/v1/models"),
        ("/heatlh", "/health"), ("/sdapi/v1/text2img", "/sdapi/v1/txt2img"), ("/docz", "/docs"),
    ],
)  # fmt: skip
def test_a_path_that_is_nearly_right_is_told_the_right_one(path: str, near: str) -> None:
    message = ask(ServeSettings(), path).json()["error"]["message"]

    assert f"did you mean {near!r}?" in message
