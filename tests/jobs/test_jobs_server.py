"""Servers that are killed, and those that end in order: their successors finish what was begun."""

import hashlib
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image

from carpool.config import ServeSettings
from carpool.jobs.store import JobStore
from carpool.server.run import state_folder
from proof.history import ENDS, Seen, problems
from support.endpoints import ENDPOINT
from support.pictures import ALIKE, gap, picture
from support.server_process import PATIENCE_S, Server, body, eventually, serving, starting

pytestmark = pytest.mark.timeout(300)  # starting a server may take long, and here are several
LONG = 80  # steps; some 0.6 s where nothing else runs: long enough to be seen, and killed in


class Client:
    """Submits and polls jobs, and remembers all that it sees."""

    def __init__(self) -> None:
        self.history: list[Seen] = []
        self.jobs: dict[str, str] = {}  # ids by request
        self.pictures: dict[str, Image.Image] = {}  # by request

    def submit(self, server: Server, request: str, seed: int, steps: int) -> None:
        """The same request may be sent again: it has a key."""
        self.history.append(Seen("submit", request=request))
        sent = body(seed=seed, num_inference_steps=steps, background_job=True)
        with server.client(headers={"idempotency-key": request}) as http:
            answer = http.post(ENDPOINT, json=sent)
        assert answer.status_code == 202, answer.text
        self.jobs[request] = answer.json()["id"]
        self.history.append(Seen("ack", self.jobs[request], request=request))

    def poll(self, server: Server) -> dict[str, dict[str, Any]]:
        """All jobs, by request."""
        found = {}
        with server.client() as http:
            for request, job_id in self.jobs.items():
                found[request] = self._poll(http, request, job_id)
        return found

    def _poll(self, http: httpx2.Client, request: str, job_id: str) -> dict[str, Any]:
        answer = http.get(f"/v1/jobs/{job_id}")
        if answer.status_code == 404:
            self.history.append(Seen("missing", job_id))
            return {"status": "missing", "progress": 0}
        job: dict[str, Any] = answer.json()
        self.history.append(Seen("poll", job_id, "", job["status"], job["progress"]))
        if job["status"] == "completed":
            content = http.get(job["files"][0]["url"]).content
            self.pictures[request] = picture(content)
            digest = hashlib.sha256(content).hexdigest()
            self.history.append(Seen("result", job_id, digest=digest))
        return job

    def is_under_way(self, server: Server) -> bool:
        """One has made steps but is not done, another is done."""
        jobs = self.poll(server).values()
        percents = [job["progress"] for job in jobs if job["status"] == "in_progress"]
        return any(percents) and any(job["status"] in ENDS for job in jobs)


def drawn(server: Server, seed: int, steps: int) -> Image.Image:
    """A picture that was drawn in one go."""
    with server.client() as http:
        sent = body(seed=seed, num_inference_steps=steps, background_job=True)
        job_id = http.post(ENDPOINT, json=sent).json()["id"]
        eventually(
            lambda: http.get(f"/v1/jobs/{job_id}").json()["status"] == "completed",
            60,
            "it is drawn",
        )
        return picture(http.get(f"/v1/jobs/{job_id}/files/0.png").content)


def kill_worker(server: Server) -> None:
    os.kill(server.worker(), signal.SIGKILL)


def kill_front(server: Server) -> None:
    server.process.kill()


def kill_both(server: Server) -> None:
    worker = server.worker()
    server.process.kill()
    os.kill(worker, signal.SIGKILL)


def test_every_job_ends_once_whoever_is_killed_and_its_picture_is_the_same(tmp_path: Path) -> None:
    client = Client()
    flags = ("--state-dir", str(tmp_path), "--max-running", "2")
    for round_, end in enumerate([kill_front, kill_both]):
        with serving(*flags) as server:
            if round_ == 0:
                for i in range(4):
                    client.submit(server, f"r{i}", seed=i, steps=3 + LONG * (i % 2))
                client.submit(server, "r0", seed=0, steps=3)  # once more
                eventually(lambda: client.is_under_way(server), 60, "some are done")
                kill_worker(server)
                eventually(lambda: server.health() == 503, 5, "the worker is gone")
                client.submit(server, "late", seed=9, steps=LONG)
                client.poll(server)  # while it cannot but be queued
                eventually(lambda: server.health() == 200, PATIENCE_S, "a new worker is ready")
            client.submit(server, f"more{round_}", seed=20 + round_, steps=LONG)
            client.poll(server)
            end(server)
            server.wait(30)

    with serving(*flags) as server:
        eventually(
            lambda: all(job["status"] in ENDS for job in client.poll(server).values()),
            100,
            "all have ended",
        )
        alone = {"r1": drawn(server, 1, 3 + LONG), "late": drawn(server, 9, LONG)}

    assert problems(client.history) == []
    assert {one.state for one in client.history if one.what == "poll"} >= {"queued", "completed"}
    assert "failed" not in {one.state for one in client.history}
    assert max(gap(client.pictures[name], image) for name, image in alone.items()) <= ALIKE


def modes(folder: Path) -> dict[str, str]:
    """Permissions of a folder and all that is in it."""
    kept = [folder, *folder.rglob("*")]
    return {str(path): oct(path.stat().st_mode & 0o777) for path in kept}


def test_a_server_has_its_folder_alone_and_leaves_it_in_order(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # as an earlier server may have made it
    flags = ("--state-dir", str(tmp_path), "--drain-timeout", "0.2")
    client = Client()
    with serving(*flags) as server:
        drawn(server, 1, 3)
        with server.client() as http:
            assert http.post(ENDPOINT, json=body(response_format="url")).status_code == 200
        kept = modes(tmp_path)
        assert len(kept) > 5
        assert {path: mode for path, mode in kept.items() if not mode.endswith("00")} == {}
        with starting(*flags) as second:
            assert second.process.wait(PATIENCE_S) == 1
            assert "another server uses it" in second.stderr
        client.submit(server, "long", seed=1, steps=1000)
        eventually(lambda: client.poll(server)["long"]["progress"] > 0, 30, "it makes steps")
        server.signal()
        assert server.wait(20) == 0

    with closing(JobStore(tmp_path)) as store:
        job = store.page()[0][0]
    assert (job.id, job.state) == (client.jobs["long"], "queued")
    assert job.progress > 0


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({}, "/state/carpool/8000"), ({"port": 0}, None), ({"state_dir": "none"}, None),
        ({"state_dir": "/else", "port": 0}, "/else"),
    ],
)  # fmt: skip
def test_jobs_are_kept_where_the_same_server_finds_them(
    settings: dict[str, Any], folder: str | None
) -> None:
    found = state_folder(ServeSettings(**settings), {"XDG_STATE_HOME": "/state"})

    assert found == (folder and Path(folder))
