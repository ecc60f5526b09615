"""What a foreign web page can make a browser do to a server without API keys: nothing."""

import base64
import hashlib
import re
from functools import cache
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from carpool.config import ServeSettings
from carpool.errors import SettingRejected
from carpool.server.app import create_app
from carpool.server.routes.docs_page import page
from support.app import Grey, answer_of, fleet_of, idle_jobs, refusal
from support.endpoints import ENDPOINT

BODY = b'{"prompt": "a"}'
JSON = "application/json"
NAVIGATION = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
PAGES = ["/docs", "/openapi.json", "/health", "/livez", "/version"]


@cache
def app_with(settings: ServeSettings) -> FastAPI:
    return create_app(fleet_of(Grey()), settings, idle_jobs())


def ask(
    path: str = "/v1/models",
    headers: Any = (),
    *,
    method: str = "GET",
    url: str = "http://127.0.0.1:8000",
    content: bytes = b"",
    **settings: Any,
) -> httpx2.Response:
    """One request to the application; `url` gives scheme and Host."""
    app = app_with(ServeSettings(**settings))
    return answer_of(app, method, path, url, headers=dict(headers), content=content)


def draw(headers: Any = (), **more: Any) -> httpx2.Response:
    told = {"content-type": JSON, **dict(headers)}
    return ask(ENDPOINT, told, method="POST", content=BODY, **more)


def code(answer: httpx2.Response) -> str:
    return str(refusal(answer)["code"])


# The origin of a page


OWN = "http://127.0.0.1:8000"
FOREIGN: dict[str, dict[str, str]] = {
    "elsewhere": {"origin": "http://evil.example"},
    "another port": {"origin": "http://127.0.0.1:3000"},
    "another scheme": {"origin": "https://127.0.0.1:8000"},
    "another name of this machine": {"origin": "http://localhost:8000"},
    "null": {"origin": "null"},
    "null, of this origin": {"origin": "null", "sec-fetch-site": "same-origin"},
    "empty": {"origin": ""},
    "a prefix": {"origin": f"{OWN}0"},
    "an extension": {"origin": "chrome-extension://abcdef"},
    "two": {"origin": f"{OWN}, http://evil.example"},
    "cross-site": {"sec-fetch-site": "cross-site"},
    "same-site": {"sec-fetch-site": "same-site"},
    "unknown site": {"sec-fetch-site": "next-door"},
    "cross-site of this origin": {"origin": OWN, "sec-fetch-site": "cross-site"},
    "cross-site image": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors",
                         "sec-fetch-dest": "image"},
    "cross-site frame": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate",
                         "sec-fetch-dest": "iframe"},
}  # fmt: skip
OURS: dict[str, dict[str, str]] = {
    "curl": {},
    "this origin": {"origin": OWN},
    "this origin, fetch": {"origin": OWN, "sec-fetch-site": "same-origin"},
    "this origin, GET": {"sec-fetch-site": "same-origin"},
    "typed": {"sec-fetch-site": "none", **NAVIGATION},
    "node": {"sec-fetch-mode": "cors"},  # its fetch says only this
}
WAYS = [("POST", ENDPOINT), ("POST", "/v1/images/edits"), ("GET", "/v1/models"), ("GET", "/stats"),
        ("GET", "/v1/requests/x"), ("HEAD", "/stats"), ("DELETE", "/v1/models"), ("GET", "/nope"),
        ("OPTIONS", ENDPOINT)]  # fmt: skip


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_page_can_do_nothing(headers: dict[str, str]) -> None:
    for method, path in WAYS:
        answer = ask(path, headers, method=method)

        assert answer.status_code == 403, (method, path)
        if method != "HEAD":
            assert code(answer) == "origin_not_allowed"
            assert "--api-key" in answer.json()["error"]["message"]
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_no_foreign_page_reads_the_open_pages_either(headers: dict[str, str]) -> None:
    for path in PAGES:
        assert code(ask(path, headers)) == "origin_not_allowed"


@pytest.mark.parametrize("headers", OURS.values(), ids=OURS)
def test_curl_and_our_own_pages_work(headers: dict[str, str]) -> None:
    assert draw(headers).status_code == 200
    assert ask(headers=headers).status_code == 200
    assert ask("/docs", headers).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_link_from_elsewhere_to_an_open_page_can_be_followed(site: str) -> None:
    link = {"sec-fetch-site": site, **NAVIGATION}

    for path in PAGES:
        assert ask(path, link).status_code == 200
        assert ask(f"/draw{path}", link, root_path="/draw").status_code == 200
        assert code(ask(path, link, method="POST")) == "origin_not_allowed"
    for path in ("/stats", "/v1/models", "/draw/stats", "/docs/", "http://127.0.0.1:8000//docs"):
        assert code(ask(path, link)) == "origin_not_allowed"


def test_a_signed_link_may_be_shown_anywhere_but_not_read_by_scripts() -> None:
    image = FOREIGN["cross-site image"]

    assert code(ask("/v1/files/x", image)) == "file_not_found"  # it got so far
    assert code(ask("/v1/files/x", image, method="DELETE")) == "origin_not_allowed"
    assert code(ask("/v1/files/x", {**image, **FOREIGN["elsewhere"]})) == "origin_not_allowed"
    assert code(ask("/v1/files/../models", image)) == "origin_not_allowed"


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_with_keys_the_key_decides(headers: dict[str, str]) -> None:
    bearer = {**headers, "authorization": "Bearer k"}

    assert draw(bearer, api_key=("k",)).status_code == 200
    assert code(draw(headers, api_key=("k",))) == "invalid_api_key"


@pytest.mark.parametrize(
    ("url", "origin", "is_ours"),
    [("https://pictures.example", "https://pictures.example", True),
     ("https://pictures.example:443", "https://pictures.example", True),
     ("http://Pictures.Example", "http://pictures.example", True),
     ("http://pictures.example:80", "http://pictures.example", True),
     ("http://pictures.example:443", "http://pictures.example", False),
     ("http://pictures.example", "https://pictures.example", False),
     ("http://[::1]:8000", "http://[::1]:8000", True)],
)  # fmt: skip
def test_an_origin_is_scheme_host_and_port(url: str, origin: str, is_ours: bool) -> None:
    answer = draw({"origin": origin}, url=url, allowed_host=("pictures.example",))

    assert answer.status_code == (200 if is_ours else 403)


def test_the_browsers_word_counts_where_a_proxy_changes_scheme_or_port() -> None:
    said = {"origin": "https://localhost:8443", "sec-fetch-site": "same-origin"}

    assert draw(said, url="http://localhost").status_code == 200


# Host: DNS rebinding


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "app.localhost", "127.0.0.1", "127.9.9.9:1",
     "[::1]:8000", "0.0.0.0", "192.168.1.5:8000", "[fe80::1%25eth0]", "8.8.8.8"],
)  # fmt: skip
def test_addresses_and_names_of_this_machine_are_answered(host: str) -> None:
    assert ask(headers={"host": host}).status_code == 200


NAMES = ["evil.example", "evil.example:8000", "localhost.evil.example", "notlocalhost", "127.1",
         "127.0.0.1.evil.example", "0x7f.1", "2130706433", "127.0.0.01", "", ":8000", "localhost..",
         "pictures.example", "[evil]", "::1", "localhost@evil.example", "evil.example#localhost",
         "a" * 10_000]  # fmt: skip


@pytest.mark.parametrize("host", NAMES, ids=lambda name: name[:30])
def test_a_name_that_is_not_ours_is_refused_on_every_path(host: str) -> None:
    for path in (*PAGES, "/v1/models", "/v1/files/x", "/nope"):
        answer = ask(path, {"host": host})

        assert (answer.status_code, code(answer)) == (403, "host_not_allowed")
    assert "--allowed-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("headers", OURS.values(), ids=OURS)
def test_a_rebound_page_is_refused_although_it_is_its_own_origin(headers: dict[str, str]) -> None:
    url = "http://evil.example:8000"
    own = {**headers, "origin": url} if "origin" in headers else headers

    assert code(draw(own, url=url)) == "host_not_allowed"


def test_no_header_but_host_says_which_host_it_is() -> None:
    said = {"host": "evil.example", "x-forwarded-host": "localhost", "forwarded": "host=localhost"}

    assert code(ask(headers=said)) == "host_not_allowed"
    assert ask(headers={**said, "host": "localhost"}).status_code == 200


@pytest.mark.parametrize(
    ("settings", "host", "is_allowed"),
    [({"allowed_host": ("pictures.example",)}, "Pictures.Example.:443", True),
     ({"allowed_host": ("Pictures.example.", "b")}, "pictures.example", True),
     ({"allowed_host": ("pictures.example",)}, "a.pictures.example", False),
     ({"allowed_host": ("pictures.example",)}, "localhost", True),
     ({"allowed_host": ("*",)}, "evil.example", True),
     ({"host": "pictures.lan"}, "pictures.lan:8000", True),
     ({"host": "0.0.0.0"}, "pictures.lan", False),
     ({"host": "::"}, "10.0.0.7:8000", True),
     ({"uds": "/x"}, "anything", True),
     ({"uds": "/x"}, "", True),
     ({"uds": "/x", "allowed_host": ("a",)}, "b", False),
     ({"api_key": ("k",)}, "anything", True),
     ({"api_key": ("k",), "allowed_host": ("a",)}, "b", False),
     ({"api_key": ("k",), "allowed_host": ("a",)}, "a", True)],
)  # fmt: skip
def test_which_hosts_are_ours_is_a_setting(
    settings: dict[str, Any], host: str, is_allowed: bool
) -> None:
    answer = ask("/livez", {"host": host}, **settings)

    assert answer.status_code == (200 if is_allowed else 403)


@pytest.mark.parametrize("name", ["http://a", "a:8000", "a/b", "*.a", "a b", "[::1", ".", "a,b"])
def test_an_allowed_host_that_can_never_match_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(SettingRejected, match="allowed_host="):
        create_app(fleet_of(Grey()), ServeSettings(allowed_host=(name,)), idle_jobs())


# Bodies that a form can send without asking


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain", "application/x-www-form-urlencoded", "text/json",
        "text/plain; application/json", "application/jsonp", "json", "",
        "application/json, text/plain", "application/octet-stream",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [ENDPOINT, "/v1/images/edits", "/v1/images/variations"])
@pytest.mark.parametrize("settings", [{}, {"api_key": ("k",)}], ids=["no keys", "keys"])
def test_json_that_is_not_called_json_is_refused(
    kind: str, path: str, settings: dict[str, Any]
) -> None:
    headers = {"authorization": "Bearer k", **({"content-type": kind} if kind else {})}

    answer = ask(path, headers, method="POST", content=BODY, **settings)

    if "urlencoded" in kind and path != ENDPOINT:  # edits take such forms, of which this is none
        assert (answer.status_code, code(answer)) == (400, "invalid_json")
        return
    assert (answer.status_code, code(answer)) == (415, "unsupported_media_type")
    message = answer.json()["error"]["message"]
    assert "application/json" in message
    assert path == ENDPOINT or "multipart/form-data" in message


@pytest.mark.parametrize(
    "kind", [JSON, "Application/JSON; charset=utf-8", "application/vnd.x+json", f" {JSON} ; a=b"]
)
def test_json_goes_by_all_its_names(kind: str) -> None:
    assert draw({"content-type": kind}).status_code == 200


# The page of our own


def test_the_docs_are_whole_and_need_no_other_host_and_run_one_script_by_its_digest() -> None:
    answer = ask("/docs")
    document = ask("/openapi.json").json()
    policy = answer.headers["content-security-policy"]
    markup, script = re.split("<script>", answer.text.removesuffix("</script>"))

    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in policy
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert not re.search(r"<script|(?:src|href)=\"?\w*:?//|@import|url\(", markup)
    assert set(re.findall(r"https?://[^/]+", answer.text)) == {"http://127.0.0.1:8000"}
    for path, item in document["paths"].items():
        for method in item:
            assert f"<code>{method.upper()} {path}</code>" in answer.text
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in answer.text
    anchors = set(re.findall(r'id="([^"]+)"', answer.text))
    assert set(re.findall(r'href="#([^"]+)"', answer.text)) <= anchors
    assert ask("/redoc").status_code == 404


def test_the_docs_show_what_a_document_says_and_run_none_of_it() -> None:
    evil = "<script>alert(1)</script>`<b>`"
    fields = {evil: {"type": evil, "description": evil, "default": evil}}
    operation = {
        "description": evil,
        "parameters": [{"name": evil, "required": True, "schema": {"enum": [evil]}}],
        "requestBody": {"content": {evil: {"schema": {"properties": fields}}}},
        "responses": {evil: {"content": {evil: {"schema": {"$ref": evil}}, "x": {}}}},
    }
    schemas = {evil: {"description": evil, "examples": [evil], "properties": fields}}
    document = {
        "info": {"title": evil, "version": evil},
        "paths": {evil: {"get": operation}},
        "components": {"schemas": schemas},
    }

    text = page(document)

    assert "&lt;script&gt;alert(1)" in text
    assert text.count("<script") == 1
    assert "<b>" not in text
