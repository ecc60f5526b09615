"""Journals of jobs on the disk: whatever happened to the file, what is read was written."""

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpool.jobs.files import JobFolders
from carpool.jobs.journal_files import JobJournals, results_bytes
from carpool.jobs.store import JobStore
from carpool.types import JournalEntry
from carpool.worker.journals import Journals
from carpool.worker.update_sender import EVERY_S
from proof.history import ENDS
from support.endpoints import ENDPOINT
from support.pictures import picture
from support.server_process import Server, body, eventually, starting

ROOM = 1 << 40  # bytes
JOB = f"image_{'0' * 32}"


def entry(number: int) -> JournalEntry:
    return JournalEntry(number, b"mark", bytes([number]) * 50)


def run(
    folder: Path, *numbers: int, most_bytes: int = 1 << 20, room: Callable[[], int] = lambda: ROOM
) -> list[JournalEntry]:
    """A run of a request that adds entries; returns what it found."""

    async def story() -> list[JournalEntry]:
        memory = Journals()
        journals = JobJournals(JobFolders(folder), memory, most_bytes, lambda _: room())
        await journals.resume(JOB, 0, "req-1")
        found = memory.entries("req-1")
        for number in numbers:
            memory.add("req-1", entry(number))
        journals.leave("req-1")
        journals.stop()
        assert memory.bytes == len(memory) == 0
        return found

    return asyncio.run(story())


def path_of(folder: Path) -> Path:
    return folder / JOB / "0.journal"


def test_the_next_run_finds_what_the_last_one_wrote(tmp_path: Path) -> None:
    assert run(tmp_path, 1, 2, 3) == []
    assert run(tmp_path, 4) == [entry(1), entry(2), entry(3)]
    assert run(tmp_path, 1, 2) == [entry(n) for n in (1, 2, 3, 4)]  # which starts over
    assert run(tmp_path) == [entry(1), entry(2)]


def test_a_torn_end_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    run(tmp_path, 1, 2)
    one_and_two = path_of(tmp_path).stat().st_size
    run(tmp_path, 3)
    whole = path_of(tmp_path).read_bytes()
    for length in range(one_and_two, len(whole)):
        path_of(tmp_path).write_bytes(whole[:length])
        assert run(tmp_path, 4) == [entry(1), entry(2)]
        assert run(tmp_path) == [entry(1), entry(2), entry(4)]


def test_a_damaged_entry_ends_the_journal_before_it(tmp_path: Path) -> None:
    run(tmp_path, 1, 2, 3)
    whole = path_of(tmp_path).read_bytes()
    third = len(whole) // 3
    for place in range(third, 2 * third):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path_of(tmp_path).write_bytes(damaged)
        assert run(tmp_path) == [entry(1)]


def test_files_have_no_more_bytes_than_they_may_and_a_job_runs_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 1, 2, 3, most_bytes=200)
    assert run(tmp_path) == [entry(1), entry(2)]
    assert "may run again" in caplog.text
    path_of(tmp_path).unlink()
    path_of(tmp_path).mkdir()
    assert run(tmp_path, 1) == []


def test_a_disk_that_becomes_full_is_left_to_results(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 1, 2, room=lambda: 1000)
    assert path_of(tmp_path).stat().st_size > 0
    assert run(tmp_path, 3, 4, room=lambda: 0) == [entry(1), entry(2)]
    assert path_of(tmp_path).stat().st_size == 0  # and what was there has made room
    assert "reserved for results" in caplog.text
    assert run(tmp_path, 1) == []
    assert run(tmp_path) == [entry(1)]  # there is room again


def test_a_small_disk_has_journals_too() -> None:
    assert results_bytes(1 << 40) == 256 << 20
    assert results_bytes(64 << 20) == 32 << 20


def test_the_journal_goes_with_its_job(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "state")
    try:
        ids = [store.submit("image", {}, {}).id for _ in range(3)]
        store.take(3)
        for job_id in ids:
            store.journals.path(job_id).mkdir()
        store.complete(ids[0], lambda folder: (folder / "a").write_text("a"))
        store.remove(ids[1])
        assert os.listdir(tmp_path / "state" / "journals") == [ids[2]]
    finally:
        store.close()
    store = JobStore(tmp_path / "state")
    try:
        assert store.journals.path(ids[2]).is_dir()  # it is still open
    finally:
        store.close()


STEPS, KILLED_AT = 200, 80


@pytest.mark.timeout(300)
def test_a_job_goes_on_at_its_next_step_in_the_next_server(tmp_path: Path) -> None:
    flags = ("--numerics", "exact", "--state-dir", str(tmp_path / "state"))
    sent = body(num_inference_steps=STEPS, background_job=True)

    def submit(server: Server) -> str:
        with server.client() as http:
            return str(http.post(ENDPOINT, json=sent).raise_for_status().json()["id"])

    def drawn(server: Server, job_id: str) -> bytes:
        def job() -> dict[str, Any]:
            return server.get(f"/v1/jobs/{job_id}").json()  # type: ignore[no-any-return]

        eventually(lambda: job()["status"] in ENDS, 120, "it has ended")
        with server.client() as http:
            return picture(http.get(job()["files"][0]["url"]).content).tobytes()

    with starting(*flags) as server:
        server.wait_ready()
        job_id, began_s = submit(server), time.monotonic()
        eventually(lambda: server.stats()["steps"] >= KILLED_AT, 60, "it has got that far")
        os.kill(server.process.pid, signal.SIGKILL)
        step_s = (time.monotonic() - began_s) / KILLED_AT
    with starting(*flags) as server:
        server.wait_ready()
        went_on = drawn(server, job_id)
        # the step under way, and those of `EVERY_S` not sent: some are twice as fast as the others
        lost = 1 + math.ceil(2 * EVERY_S / step_s)
        assert server.stats()["steps"] <= STEPS - KILLED_AT + lost
        assert os.listdir(tmp_path / "state" / "journals") == []
        assert drawn(server, submit(server)) == went_on
