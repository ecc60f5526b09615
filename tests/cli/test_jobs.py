"""`carpool jobs` against a real server: what it prints, what it writes, how it ends."""

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command_line import Run
from support.endpoints import ENDPOINT
from support.pictures import picture
from support.server_process import PATIENCE_S, Server, body, eventually, serving

pytestmark = pytest.mark.timeout(PATIENCE_S + 60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--api-key", "alice=secret", "--api-key", "bob=other") as server:
        yield server


def submitted(server: Server, *, key: str = "secret", **fields: Any) -> str:
    with server.client(headers={"authorization": f"Bearer {key}"}) as client:
        answer = client.post(ENDPOINT, json=body(background_job=True, **fields))
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


@pytest.fixture
def jobs(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `carpool jobs ARGUMENTS` as alice."""
    monkeypatch.setenv("CARPOOL_API_KEY", "secret")
    return lambda *arguments: run("jobs", *arguments, "--url", server.url)


def state(jobs: Run, job_id: str) -> str:
    return str(json.loads(jobs("show", job_id, "--json").out)["status"])


def ended(jobs: Run, job_id: str) -> str:
    eventually(lambda: state(jobs, job_id) not in ("queued", "in_progress"), 50, "it ends")
    return state(jobs, job_id)


def test_top_without_a_terminal_prints_the_present_state_once(run: Run, server: Server) -> None:
    ended = run("top", "--url", server.url, "--api-key", "secret")
    refused = run("top", "--url", server.url, "--api-key", "wrong")

    assert ended.status == 0
    assert "flux ready   running 0   waiting 0" in ended.out
    assert refused.status == 1
    assert "API key" in refused.err
    assert "secret" not in ended.out


def test_files_of_a_job_are_fetched_under_names_of_their_own(jobs: Run, server: Server) -> None:
    job_id = submitted(server, n=2, output_format="webp")
    assert ended(jobs, job_id) == "completed"

    fetched = jobs("fetch", job_id, "-o", "new/folder")

    assert (fetched.status, fetched.err) == (0, "")
    paths = [Path(line) for line in fetched.out.splitlines()]
    assert paths == [Path(f"new/folder/{job_id}-{i}.webp") for i in (0, 1)]
    assert {picture(path.read_bytes()).format for path in paths} == {"WEBP"}
    assert sorted(Path("new/folder").iterdir()) == paths  # and no halves
    told = [json.loads(line) for line in jobs("fetch", job_id, "--json").out.splitlines()]
    assert [(one["path"], one["bytes"]) for one in told] == [
        (f"{job_id}-{i}.webp", path.stat().st_size) for i, path in enumerate(paths)
    ]


def test_jobs_are_listed_newest_first_and_only_ones_own(jobs: Run, server: Server) -> None:
    ids = [submitted(server) for _ in range(3)]
    foreign = submitted(server, key="other")

    lines = jobs("list", "--limit", "2").out.splitlines()

    assert [line.split()[0] for line in lines] == [ids[2], ids[1]]
    assert lines[0].split()[-1] == "flux"
    everything = jobs("list", "--limit", "500", "--json").out.splitlines()
    found = [json.loads(line)["id"] for line in everything]
    assert found[:3] == ids[::-1]
    assert foreign not in found
    assert jobs("show", foreign).status == 1


def test_long_lists_take_several_pages(
    jobs: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [submitted(server) for _ in range(5)]
    monkeypatch.setattr("carpool.cli.jobs.JOBS_PER_PAGE", 2)

    listed = jobs("list", "--limit", "5").out.splitlines()

    assert [line.split()[0] for line in listed] == ids[::-1]


def test_a_job_is_shown_cancelled_and_removed(jobs: Run, server: Server) -> None:
    job_id = submitted(server, num_inference_steps=900, seed=4)
    shown = jobs("show", job_id).out
    assert f"id              {job_id}\n" in shown
    assert "seeds           [4]\n" in shown

    refused = jobs("fetch", job_id)
    assert (refused.status, refused.out) == (1, "")
    assert f"carpool: job {job_id} has no files: it is " in refused.err

    cancelled = jobs("cancel", job_id)
    assert cancelled.status == 0
    assert cancelled.out.split()[:2] == [job_id, "cancelled"]
    assert "status          cancelled: the job was cancelled\n" in jobs("show", job_id).out
    assert state(jobs, job_id) == "cancelled"

    assert jobs("remove", job_id).out == f"{job_id}\n"
    for command in ("show", "cancel", "remove", "fetch"):
        gone = jobs(command, job_id)
        assert (gone.status, gone.out) == (1, "")
        assert gone.err.startswith(f"carpool: there is no job '{job_id}'")


def test_a_wrong_key_is_told(jobs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = jobs("list", "--api-key", "wrong")
    assert (refused.status, refused.out) == (1, "")
    assert "API key" in refused.err

    monkeypatch.delenv("CARPOOL_API_KEY")
    assert jobs("list").status == 1
    assert jobs("list", "--api-key", "secret").status == 0


@pytest.mark.parametrize("job_id", ["../models", "..", "", "a?b#c", "image_1/cancel"])
def test_an_id_that_is_a_path_leads_nowhere_else(jobs: Run, job_id: str) -> None:
    shown = jobs("show", job_id)

    assert (shown.status, shown.out) == (1, "")
    assert shown.err.startswith("carpool: ")
    assert "Traceback" not in shown.err


# Servers that are none


@pytest.mark.parametrize("command", ["jobs list", "top --once", "generate a"])
def test_nobody_there_ends_with_1_and_one_line(run: Run, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

    ended = run(*command.split(), "--url", url)

    assert (ended.status, ended.out) == (1, "")
    [line] = ended.err.splitlines()
    assert line.startswith(f"carpool: no answer from {url}: ")
    assert line.endswith("is `carpool serve` running there?")


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"error": "no"}'])
def test_another_kind_of_server_ends_with_1_and_one_line(run: Run, content: bytes) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever).start()
        url = f"http://127.0.0.1:{other.server_port}/v1"
        ended = run("jobs", "show", "image_1", "--url", url)
        other.shutdown()

    assert (ended.status, ended.out) == (1, "")
    assert ended.err == f"carpool: {url} answers 404, not as `carpool serve` does\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"], ["list", "--limit", "0"], ["list", "--url", "nowhere"], ["drop", "x"],
        ["list", "--url", "http://[::1"], ["fetch", "x", "-o", __file__],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_use_ends_with_2(run: Run, arguments: list[str]) -> None:
    ended = run("jobs", *arguments)

    assert (ended.status, ended.out) == (2, "")
    assert "Usage: " in ended.err
    assert "carpool jobs" in ended.err
