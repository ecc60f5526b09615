"""Log lines: one a request, with its id and key, never with what was asked for."""

import json
import logging
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx2
import pytest

from carpool.config import ServeSettings
from carpool.server.app import create_app
from carpool.telemetry import logs
from carpool.telemetry.logs import JSONLines, TextLines
from carpool.worker.supervisor import Supervisor
from support.app import Grey, Lone, answer_of, fleet_of, idle_jobs
from support.app import ask as asked

PROMPT = "a secret wish"


def ask(
    method: str, path: str, settings: ServeSettings | None = None, **headers: str
) -> httpx2.Response:
    app = create_app(fleet_of(Lone()), settings or ServeSettings(), idle_jobs())
    json = {"prompt": PROMPT} if method == "POST" else None
    return answer_of(app, method, path, json=json, headers=headers)


class Kept(logging.Handler):
    """Keeps all lines as objects."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.setFormatter(JSONLines())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """All lines that are written, as objects."""
    caplog.set_level(logging.DEBUG, "carpool")
    kept = Kept()
    logging.getLogger("carpool").addHandler(kept)
    yield kept.lines
    logging.getLogger("carpool").removeHandler(kept)


def test_every_request_leaves_one_line_that_says_whose_it_was(lines: list[dict[str, Any]]) -> None:
    settings = ServeSettings(api_key=("mobile=secret-key",))

    answer = ask("POST", "/v1/images/generations", settings, authorization="Bearer secret-key")

    [line] = lines
    when = datetime.fromisoformat(line.pop("time"))
    assert when.utcoffset() is not None
    assert line.pop("duration_ms") >= 0
    assert line.pop("message").startswith("POST /v1/images/generations 503 ")
    assert line == {
        "level": "info", "logger": "carpool.access", "request_id": answer.headers["x-request-id"],
        "key": "mobile", "method": "POST", "path": "/v1/images/generations", "status": 503,
        "error": "starting", "reason": "the model is still loading",
    }  # fmt: skip


def test_neither_prompts_nor_keys_nor_queries_are_logged(lines: list[dict[str, Any]]) -> None:
    settings = ServeSettings(api_key=("mobile=secret-key",))
    for key in ("secret-key", "wrong-key"):
        ask("POST", f"/v1/images/generations?q={PROMPT}", settings, authorization=f"Bearer {key}")

    told = json.dumps(lines)

    for secret in (PROMPT, "wish", "secret-key", "wrong-key"):
        assert secret not in told
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("count", "told"), [("0", None), ("1", "1"), ("99", "99"), ("100", None), ("x 200", None)]
)
def test_an_sdk_that_tries_again_is_seen(
    lines: list[dict[str, Any]], count: str, told: str | None
) -> None:
    ask("POST", "/v1/images/generations", None, **{"x-stainless-retry-count": count})

    [line] = lines
    assert line.get("retry") == told


def test_a_path_cannot_forge_a_line(lines: list[dict[str, Any]]) -> None:
    ask("GET", "/%0a2026-01-01 INFO all is well")
    ask("GET", "/" + "x" * 5000)

    for line in lines:
        assert "\n" not in line["message"]
        assert len(line["message"]) < 300


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/health", "/", "/playground/app.js"])
def test_probes_and_files_of_the_playground_are_for_debugging_only(
    lines: list[dict[str, Any]], path: str
) -> None:
    ask("GET", path)

    assert [line["level"] for line in lines] == ["debug"]


def test_a_refused_request_says_its_code_and_its_reason(lines: list[dict[str, Any]]) -> None:
    asked(json.dumps({"prompt": PROMPT, "zzz": 4}))

    [line] = lines
    assert (line["status"], line["error"]) == (400, "unknown_parameter")
    assert line["reason"] == "GreyPipeline has no parameter 'zzz'"
    assert f" error=unknown_parameter reason={line['reason']}" in line["message"]


def test_whatever_is_logged_for_a_request_says_which(
    lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Supervisor) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Supervisor, "check_open", fail)

    answer = ask("GET", "/v1/models")

    failure, access = lines
    assert "RuntimeError: broken" in failure["exception"]
    assert (access["status"], failure["level"]) == (500, "error")
    assert failure["request_id"] == access["request_id"] == answer.headers["x-request-id"]


def test_a_line_is_one_line_whatever_is_said() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "two\nlines: %s", ("ü\u2028",), None)

    line = JSONLines().format(record)

    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == "two\nlines: ü\u2028"


def test_outside_of_a_request_nothing_is_said_of_one() -> None:
    assert "request_id" not in json.loads(
        JSONLines().format(logging.LogRecord("x", logging.INFO, "", 0, "idle", (), None))
    )


@pytest.mark.parametrize("format_", ["text", "json"])
def test_lines_go_to_standard_error_from_the_level_on(
    format_: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.NOTSET)

    logs.set_up("warning", format_)
    logging.getLogger("carpool").info("quiet")
    logging.getLogger("carpool").warning("loud")

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    if format_ == "json":
        assert json.loads(err)["message"] == "loud"
    else:
        assert err.endswith(" WARNING loud\n")
    assert root.handlers[0].stream is sys.stderr  # type: ignore[attr-defined]


# Prompts


CUT = "The following part of your input was truncated because CLIP can only handle sequences up to"


@pytest.mark.parametrize("why", [CUT, "Your input was truncated because `x` is set to"])
def test_what_diffusers_repeats_of_a_long_prompt_is_cut_out(why: str) -> None:
    record = logging.makeLogRecord({"msg": f"{why} 77 tokens: ['{PROMPT}']"})

    assert logs.without_prompts(record)
    assert record.getMessage() == f"{why} 77 tokens"


def test_other_lines_stay_as_they_are() -> None:
    record = logging.makeLogRecord({"msg": "%d of %s tokens: %s", "args": (3, "7", "kept")})

    assert logs.without_prompts(record)
    assert record.getMessage() == "3 of 7 tokens: kept"


@pytest.mark.parametrize("is_wanted", [False, True])
def test_prompts_are_logged_only_where_that_is_asked_for(
    caplog: pytest.LogCaptureFixture, is_wanted: bool
) -> None:
    caplog.set_level(logging.DEBUG)

    asked(json.dumps({"prompt": PROMPT}), worker=Grey(), log_prompts=is_wanted)

    assert (PROMPT in caplog.text) is is_wanted


@pytest.mark.parametrize("format_", [JSONLines(), TextLines(logs.TEXT)])
def test_no_line_is_longer_than_a_log_can_bear(format_: logging.Formatter) -> None:
    said = "x" * 1_000_000
    try:
        raise ValueError(said)
    except ValueError:
        record = logging.LogRecord("a", 30, "a.py", 1, "%s", (said,), sys.exc_info())

    line = format_.format(record)

    assert len(line) < 40_000
    assert line.rstrip('"}').endswith(" characters")
    if isinstance(format_, JSONLines):
        assert json.loads(line)["message"].endswith(" ... 1000000 characters")
