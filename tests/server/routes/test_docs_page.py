"""`GET /docs` and docs/http.md: each route has an example, and the examples are taken."""

import json
import shlex
from typing import Any

import httpx2
import pytest

from carpool.config import ServeSettings
from carpool.server.app import create_app
from carpool.server.routes.docs_page import curl, sample
from support.app import Grey, answer_of, fleet_of, idle_jobs

APP = create_app(fleet_of(Grey()), ServeSettings(), idle_jobs())
DOCUMENT = APP.openapi()
SCHEMAS = DOCUMENT["components"]["schemas"]
OPERATIONS = [
    (method, path, operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]


def send(method: str, path: str, body: Any) -> httpx2.Response:
    return answer_of(APP, method, path, "http://127.0.0.1", json=body)


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS)
def test_each_route_has_a_command_that_a_shell_reads(
    method: str, path: str, operation: Any
) -> None:
    words = shlex.split(curl(method, path, operation, SCHEMAS))

    assert words[0] == "curl"
    assert ("authorization: Bearer KEY" in words) == bool(operation.get("security"))
    assert not any("{" in word for word in words if "://" in word)
    if "--json" in words:
        assert json.loads(words[words.index("--json") + 1]) == sample(operation, SCHEMAS)


@pytest.mark.parametrize(
    "path", ["/v1/images/generations", "/sdapi/v1/txt2img", "/v1/chat/completions", "/"]
)
def test_a_body_of_an_example_is_taken_as_it_is(path: str) -> None:
    body = sample(DOCUMENT["paths"][path]["post"], SCHEMAS)

    answer = send("POST", path, body)

    assert answer.status_code == 200, answer.text


def test_the_page_has_contents_and_a_place_to_try_each_route() -> None:
    text = send("GET", "/docs", None).text

    for method, path, operation in OPERATIONS:
        assert f'<a href="#{method}-{path}">' in text
        assert f'id="{method}-{path}"' in text
        assert f'data-method="{method.upper()}" data-path="' in text
        assert operation["responses"]
    assert text.count('<details class="try"') == len(OPERATIONS)
