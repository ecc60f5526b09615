"""What clients are told of failures: never where a file of the server lies. The log is."""

import asyncio
import logging
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.config import ServeSettings
from carpool.errors import PipelineFailed, StoreFailed, in_full, nearest, reason, without_paths
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.server.app import create_app
from carpool.server.routes.jobs import write_images
from carpool.types import CheckedRequest, Timings
from carpool.worker import protocol
from carpool.worker.connection import mapped
from carpool.worker.request_listener import failed
from support.app import CARD, Grey, fleet_of
from support.endpoints import ENDPOINT

WORK = {"prompt": "a circle", "seed": 1}
FULL = OSError(28, "No space left on device", "/srv/secret/state/files/x.part")

# Texts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no file /srv/secret/a b", "no file <path> b"),
        ("[Errno 2] No such file: '/srv/my secret/a.txt'", "[Errno 2] No such file: '<path>'"),
        ('cannot open "/srv/secret", sorry', 'cannot open "<path>", sorry'),
        ("/srv/secret/x.py:12: bad", "<path>: bad"),
        ("no /srv/secret/a. Is it /srv/secret/b?", "no <path>. Is it <path>?"),
        ("path=/srv/secret", "path=<path>"),
        ("(/srv/secret)", "(<path>)"),
        ("PATH is /a/secret:/b/secret", "PATH is <path>"),
        ("in ~/secret/x and ~root/secret", "in <path> and <path>"),
        ("file:///srv/secret and sqlite:////srv/secret", "<path> and <path>"),
        ("'file:///srv/my secret'", "'<path>'"),
        ("cut short: '/srv/secret/a...", "cut short: '<path>..."),
        ("first\n/srv/secret\nlast", "first\n<path>\nlast"),
        ("/.cache/secret", "<path>"),
    ],
)
def test_paths_are_cut_out_of_texts_of_others(text: str, told: str) -> None:
    assert without_paths(text) == told


@pytest.mark.parametrize(
    "text",
    [
        "height/width must be 1/2 or 3 / 4 of it",
        "see https://huggingface.co/docs/diffusers and http://localhost:8000/v1/jobs",
        "no model org/name: give a hub id like 'org/name'",
        "`prompt`/`prompt_2` and '/' and \"a/b\"",
        "n/a, I/O error, ./relative, ../up",
        "",
    ],
)
def test_what_is_no_absolute_path_stays(text: str) -> None:
    assert without_paths(text) == text


PARTS = st.lists(st.from_regex(r"[a-z0-9_.-]*secret[a-z0-9_.-]*", fullmatch=True), min_size=1)


@given(PARTS, st.sampled_from(["{}", "a {} b", "'{}'", '"{}"', "x={}", "({})", "{}: bad", "E:{}"]))
def test_nothing_of_a_path_is_left(parts: list[str], text: str) -> None:
    assert "secret" not in without_paths(text.format("/" + "/".join(parts)))


def test_an_errors_own_file_name_is_for_the_log_only() -> None:
    failed = StoreFailed(f"not stored: {reason(FULL)}")
    failed.__cause__ = FULL

    assert failed.body["message"] == "not stored: No space left on device"
    assert "/srv/secret/state/files/x.part" in in_full(failed)


# Over HTTP


class Failing(Grey):
    """Draws, or fails as a worker does: from the second picture of a request on, if told so."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.spares_first = False

    async def submit(self, request: CheckedRequest, *_: Any, **__: Any) -> protocol.Done:
        if self.error is not None and not (self.spares_first and request.seed == WORK["seed"]):
            await asyncio.sleep(0.05 if self.spares_first else 0)
            told = failed(request.request_id, self.error)
            raise PipelineFailed(told.message)
        return await super().submit(request)


async def ended(http: httpx2.AsyncClient, job: dict[str, Any]) -> str:
    for _ in range(200):
        answer = await http.get(f"/v1/jobs/{job['id']}")
        if answer.json()["status"] not in ("queued", "in_progress"):
            return answer.text
        await asyncio.sleep(0.01)
    raise AssertionError(f"{job} does not end")


@asynccontextmanager
async def opened(
    folder: Path, worker: Grey, writers: Any = None
) -> AsyncIterator[tuple[httpx2.AsyncClient, JobStore]]:
    store = JobStore(folder)
    runner = Runner(
        store, worker, writers or {"image": write_images}, model=lambda: CARD.id, max_running=1,
        again_s=0.01,
    )  # fmt: skip
    worker.is_open.set()
    running = asyncio.create_task(runner.run())
    transport = httpx2.ASGITransport(create_app(fleet_of(worker), ServeSettings(port=0), runner))
    try:
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http, store
    finally:
        running.cancel()
        await runner.stop()
        store.close()


Scene = Callable[[httpx2.AsyncClient, JobStore, Failing, pytest.MonkeyPatch], Any]


async def a_link_on_a_full_disk(
    http: httpx2.AsyncClient, store: JobStore, worker: Failing, patch: pytest.MonkeyPatch
) -> list[str]:
    (store.folder / "links").rename(store.folder / "moved")
    return [(await http.post(ENDPOINT, json={**WORK, "response_format": "url"})).text]


async def a_pipeline_that_misses_a_file(
    http: httpx2.AsyncClient, store: JobStore, worker: Failing, patch: pytest.MonkeyPatch
) -> list[str]:
    worker.error = FileNotFoundError(2, "No such file or directory", f"{store.folder}/model")
    job = (await http.post(ENDPOINT, json={**WORK, "background_job": True})).json()
    told = [(await http.post(ENDPOINT, json=WORK)).text, await ended(http, job)]
    worker.spares_first = True
    stream = await http.post(ENDPOINT, json={**WORK, "stream": True, "n": 2})
    assert "event: error" in stream.text
    return [*told, stream.text.partition("event: error")[2]]


async def a_pipeline_that_names_a_file(
    http: httpx2.AsyncClient, store: JobStore, worker: Failing, patch: pytest.MonkeyPatch
) -> list[str]:
    worker.error = ValueError(f"Cannot load {store.folder}/model.bin from '{store.folder}'")
    job = (await http.post(ENDPOINT, json={**WORK, "background_job": True})).json()
    return [(await http.post(ENDPOINT, json=WORK)).text, await ended(http, job)]


async def a_job_on_a_full_disk(
    http: httpx2.AsyncClient, store: JobStore, worker: Failing, patch: pytest.MonkeyPatch
) -> list[str]:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device", f"{store.folder}/files/x.part")

    patch.setattr(store._files, "write", refuse)
    job = (await http.post(ENDPOINT, json={**WORK, "background_job": True})).json()
    return [await ended(http, job)]


async def a_job_whose_files_cannot_be_made(
    http: httpx2.AsyncClient, store: JobStore, worker: Failing, patch: pytest.MonkeyPatch
) -> list[str]:
    def refuse(*_: Any) -> None:
        raise RuntimeError(f"the encoder cannot write {store.folder}/files/0.png")

    patch.setattr(store._files, "write", refuse)
    job = (await http.post(ENDPOINT, json={**WORK, "background_job": True})).json()
    return [await ended(http, job)]


async def a_store_that_cannot_be_read_or_written(
    http: httpx2.AsyncClient, store: JobStore, worker: Failing, patch: pytest.MonkeyPatch
) -> list[str]:
    broken = sqlite3.connect(":memory:", check_same_thread=False)
    broken.close()
    whole, store._db._db = store._db._db, broken
    try:
        return [
            (await http.get("/v1/jobs")).text,
            (await http.post(ENDPOINT, json={**WORK, "background_job": True})).text,
        ]
    finally:
        store._db._db = whole


async def a_job_that_an_older_server_left(
    http: httpx2.AsyncClient, store: JobStore, worker: Failing, patch: pytest.MonkeyPatch
) -> list[str]:
    job = store.submit("image", {}, {})
    told = '{"code": "store_failed", "message": "no room at ' + str(store.folder) + '/x"}'
    store._db.write("UPDATE jobs SET state = 'failed', error = ? WHERE id = ?", [told, job.id])
    logging.getLogger("carpool").error("%s", store.folder)  # as that server did
    return [(await http.get(f"/v1/jobs/{job.id}")).text]


@pytest.mark.parametrize(
    "scene",
    [
        a_link_on_a_full_disk, a_pipeline_that_misses_a_file, a_pipeline_that_names_a_file,
        a_job_on_a_full_disk, a_job_whose_files_cannot_be_made,
        a_store_that_cannot_be_read_or_written, a_job_that_an_older_server_left,
    ],
    ids=lambda scene: scene.__name__,
)  # fmt: skip
async def test_no_failure_tells_a_client_where_files_lie_and_the_log_does(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[str] = []

    worker = Failing()
    async with opened(tmp_path / "state", worker) as (http, store):
        answers.extend(await scene(http, store, worker, monkeypatch))

    assert answers
    for answer in answers:
        assert '"message":' in answer
        assert str(tmp_path) not in answer
        assert not re.search(r"(?<![\w./])/(?!v1/)\w+/\w", answer), answer
        assert "sqlite" not in answer.lower()
        assert "closed database" not in answer
    if scene is not a_store_that_cannot_be_read_or_written:
        assert str(tmp_path / "state") in caplog.text
    else:
        assert "closed database" in caplog.text


def test_an_output_that_cannot_be_taken_over_is_told_without_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.rgb"
    os.mkfifo(path)
    path.unlink()
    clip = protocol.RawVideo(16, 16, 1, b"", path=os.fsencode(path))
    failed = mapped(protocol.Done("r", 1, [], Timings(), protocol.TokenUsage(1, 1), clip))

    assert isinstance(failed, protocol.RequestFailed)
    assert failed.message == "the output could not be taken over: No such file or directory"
    assert str(path) in caplog.text


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        OSError(2, "No such file or directory", "/root/.cache/huggingface/hub/models--secret"),
        ValueError("cannot load '/root/.cache/secret dir/model.safetensors'"),
        RuntimeError("/opt/secret/aten/src/ATen/native/x.cpp:12: expected 4 channels"),
    ],
)
def test_a_pipelines_exception_is_told_without_the_paths_that_it_names(
    error: Exception, is_early: bool
) -> None:
    from carpool.engine.pipeline_errors import (
        to_api_error,  # brings torch, which no other test here needs
    )

    told = to_api_error(error, is_early=is_early, arguments=["image"])

    assert "secret" not in str(told)
    assert str(told).startswith("the pipeline ")
    assert "secret" in in_full(told)


@pytest.mark.parametrize("name", ["Width", "WIDTH", "widht", "iwdth", "with"])
def test_a_near_miss_is_found_in_other_letters_and_with_letters_that_changed_places(
    name: str,
) -> None:
    assert nearest(name, ["height", "width", "seed"]) == "; did you mean 'width'?"
