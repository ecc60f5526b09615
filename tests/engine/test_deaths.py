"""Whoever dies first, and whenever: no process stays, no socket, and no temporary file for good."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest

from carpool.jobs.store import JobStore
from carpool.server.transport.listening import UnixSocket
from support.endpoints import ENDPOINT
from support.server_process import MODEL, PATIENCE_S, Server, body, eventually, starting

pytestmark = pytest.mark.timeout(150)  # starting a server may take long
ENDLESS = 1000  # steps; some 15 s where nothing else runs
TERM, INT, KILL, STOP = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP

Stage = Literal["loading", "idle", "drawing"]
Whom = Literal["front", "worker"]
ORDERS: dict[str, list[tuple[Whom, signal.Signals]]] = {
    "told": [("front", TERM)],
    "told twice": [("front", TERM), ("front", TERM)],
    "interrupted": [("front", INT)],
    "told, then killed": [("front", TERM), ("front", KILL)],
    "front killed": [("front", KILL)],
    "front killed, then its worker": [("front", KILL), ("worker", KILL)],
    "worker killed": [("worker", KILL), ("front", TERM)],
    "worker killed, then the front": [("worker", KILL), ("front", KILL)],
    "worker stopped": [("worker", STOP), ("front", TERM)],
    "worker stopped, front killed": [("worker", STOP), ("front", KILL)],
}
LOADS = """
import pathlib, time

def build():
    pathlib.Path(__file__).with_name("loads").touch()
    time.sleep(3600)
"""
STATUS = {"told": 0, "interrupted": 130}  # of a server that still loads


@dataclass
class House:
    """A server on a Unix socket, and the folders that it uses."""

    server: Server
    worker: int
    socket: Path
    state: Path
    temporary: Path

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        transport = httpx2.HTTPTransport(uds=str(self.socket))
        with httpx2.Client(transport=transport, base_url="http://localhost", timeout=30) as client:
            return client.request(method, path, **options)

    def strike(self, order: str) -> None:
        pids = {"front": self.server.process.pid, "worker": self.worker}
        for whom, number in ORDERS[order]:
            with suppress(ProcessLookupError):  # one may have taken the other along
                os.kill(pids[whom], number)


@contextmanager
def house(stage: Stage, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """A server at some stage. While it loads, without an end, it has no folder for its jobs."""
    temporary, state, path = folder / "tmp", folder / "state", folder / "carpool.sock"
    temporary.mkdir()
    tempfile.gettempdir()  # where `starting` keeps its own files
    monkeypatch.setenv("TMPDIR", str(temporary))
    flags, model = ["--uds", str(path), "--drain-timeout", "0.5", "--state-dir", str(state)], MODEL
    if stage == "loading":
        (file := folder / "mine.py").write_text(LOADS)
        flags, model = [*flags[:-1], "none", "--pipeline", f"{file}:build"], ""
    with starting(*flags, model=model) as server:
        eventually(lambda: "listening on" in server.stderr, PATIENCE_S, "it listens")
        if stage == "loading":
            eventually((folder / "loads").exists, PATIENCE_S, "its worker loads")
        else:
            eventually(lambda: "unix:" in server.stdout, PATIENCE_S, "it serves")
        whole = House(server, server.worker(), path, state, temporary)
        if stage == "drawing":
            sent = body(num_inference_steps=ENDLESS, background_job=True)
            assert whole.ask("POST", ENDPOINT, json=sent).status_code == 202
            eventually(lambda: whole.ask("GET", "/stats").json()["steps"] > 0, 30, "it makes steps")
        yield whole


def left_in(folder: Path) -> list[str]:
    """Files and folders but torch's own cache."""
    return [file.name for file in folder.iterdir() if not file.name.startswith("torchinductor_")]


def assert_nothing_stays(house: House, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left can be used again, and what cannot be used is gone once that is done."""
    status = house.server.wait()  # for the last of its processes
    assert house.state.exists() or status == STATUS.get(order, status)
    is_orderly = ORDERS[order][-1][0] == "front" and ORDERS[order][-1][1] != KILL
    if is_orderly:
        assert not house.socket.exists()
        assert not left_in(house.temporary)
    with closing((unix := UnixSocket(house.socket)).socket):
        unix.remove()
    if house.state.exists():
        with closing(JobStore(house.state)) as store:
            assert not [*store.passing.iterdir()]
            assert not [*(house.state / "files").iterdir()]
            assert {job.state for job in store.page()[0]} <= {"queued"}
        assert {path.name for path in house.state.iterdir()} <= {
            "carpool-state.txt", "files", "inputs", "jobs.sqlite", "journals", "links", "lock",
            "passing",
        }  # fmt: skip
    monkeypatch.setattr(tempfile, "tempdir", str(house.temporary))
    JobStore().close()
    assert not left_in(house.temporary)


def story(stage: Stage, order: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with house(stage, folder, monkeypatch) as struck:
        struck.strike(order)

        assert_nothing_stays(struck, order, monkeypatch)


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_stays_of_a_server_that_ends_while_it_loads(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story("loading", order, tmp_path, monkeypatch)


def test_a_stopped_worker_in_the_middle_of_a_picture_does_not_outlive_its_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story("drawing", "worker stopped, front killed", tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["idle", "drawing"])
@pytest.mark.parametrize("order", ORDERS)
def test_nothing_stays_of_a_server_whenever_it_ends(
    stage: Stage, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story(stage, order, tmp_path, monkeypatch)
