"""A process that keeps jobs is killed, or its disk is full: what it acknowledged is there.

Run as a program (`python test_jobs_crash.py FOLDER SEED MAX_FILE_BYTES`), this file is that
process: it does to a store whatever a server might, and says what it did on standard output.
"""

import contextlib
import hashlib
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from carpool.errors import Overloaded, PipelineFailed, StoreFailed
from carpool.jobs.store import JobStore
from proof.history import ENDS, Seen, problems

KILLS = 6
ROOM = 200_000  # bytes that a file may have where the disk is said to be full
CHILD_PATH = os.pathsep.join(str(Path(__file__).parents[up]) for up in (1, 2))


def write(folder: Path, job: str) -> None:
    """The files of a job: large enough to be caught half written."""
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(job.encode() * 4000)


def begins_from(request: str) -> dict[str, bytes]:
    """A file that a job needs, large enough too."""
    return {"in": request.encode() * 4000}


def digest(store: JobStore, job: str) -> str:
    paths = [store.file(store.get(job), name) for name in ("a.bin", "b.bin")]
    files = [path.read_bytes() for path in paths if path is not None]
    return hashlib.sha256(b"".join(files)).hexdigest()


def say(seen: Seen) -> None:
    print(json.dumps(asdict(seen)), flush=True)


def live(folder: Path, seed: int) -> None:
    """Work at random until killed; a full disk is lived with."""
    rng, store = random.Random(seed), JobStore(folder, max_waiting=40)
    requests, running = iter(range(10**9)), list[str]()
    while True:
        with contextlib.suppress(StoreFailed, Overloaded):
            what = rng.random()
            if what < 0.4:
                request = f"{seed}-{next(requests)}"
                say(Seen("submit", request=request))
                asked, inputs = {"filler": "x" * 5000, "request": request}, begins_from(request)
                job = store.submit("video", asked, {"n": 1}, key=request, inputs=inputs)
                say(Seen("ack", job.id, request=request))
            elif what < 0.6:
                running += [job.id for job in store.take(rng.randint(1, 3))]
            elif what < 0.65 and running:
                store.requeue(running.pop(0))
            elif what < 0.9 and running:
                job_id = running[0]
                if store.complete(job_id, lambda folder, name=job_id: write(folder, name)):  # type: ignore[misc]
                    say(Seen("poll", job_id, state="completed", progress=100))
                    say(Seen("result", job_id, digest=digest(store, job_id)))
                running.remove(job_id)
            elif running:
                job_id = running[-1]
                if store.end(job_id, "failed", PipelineFailed("it broke")):
                    say(Seen("poll", job_id, state="failed"))
                running.remove(job_id)


def told(process: subprocess.Popen[str], lines: int) -> list[Seen]:
    """What the process says in so many lines, and in those that it gets out until it is killed."""
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    said += process.stdout.readlines()
    assert process.wait() == -signal.SIGKILL, said
    return [Seen(**json.loads(line)) for line in said if line.endswith("\n")]


@contextlib.contextmanager
def living(folder: Path, seed: int, room: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, str(folder), str(seed), str(room)]
    environment = {**os.environ, "PYTHONPATH": CHILD_PATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def polled(store: JobStore) -> list[Seen]:
    """Every job as it is, its files too."""
    seen = []
    for job in store.page(limit=10**6)[0]:
        seen.append(Seen("poll", job.id, state=job.state, progress=job.progress))
        if job.state == "completed":
            seen.append(Seen("result", job.id, digest=digest(store, job.id)))
    return seen


def finish(store: JobStore) -> None:
    """Run what is queued to its end."""
    while jobs := store.take(10):
        for job in jobs:
            assert {"in": store.input(job.id, "in")} == begins_from(job.asked["request"])
            assert store.complete(job.id, lambda folder, name=job.id: write(folder, name))  # type: ignore[misc]


def is_sound(folder: Path) -> bool:
    with contextlib.closing(sqlite3.connect(folder / "jobs.sqlite")) as db:
        return db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("room", [0, ROOM], ids=["", "the disk is full"])
def test_nothing_acknowledged_is_lost_twice_there_or_back_from_the_dead(
    tmp_path: Path, room: int
) -> None:
    history: list[Seen] = []
    for seed in range(KILLS if room == 0 else 3):
        with living(tmp_path, seed, room) as process:
            history += told(process, 20 + random.Random(seed).randrange(200))
        assert (tmp_path / "jobs.sqlite").stat().st_size > room / 2  # it was full indeed
        store = JobStore(tmp_path)
        seen = polled(store)
        assert not any(one.state == "in_progress" for one in seen)
        history += seen
        store.close()

    store = JobStore(tmp_path)
    finish(store)
    history += polled(store)
    assert not list((tmp_path / "inputs").iterdir())
    sizes = {len(path.read_bytes()) for path in (tmp_path / "files").rglob("*.bin")}
    store.close()

    assert problems(history) == []
    assert {one.state for one in history if one.what == "poll"} >= {"queued", *ENDS[:2]}
    assert len(sizes) == 1
    assert is_sound(tmp_path)


def test_a_full_disk_fails_what_is_written_and_nothing_else(tmp_path: Path) -> None:
    """With the limit on file sizes the kernel itself refuses to write on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = JobStore(tmp_path)
    kept = [store.submit("video", {}, {}).id for _ in range(3)]
    store.take(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, limits[1]))
    try:
        with pytest.raises(StoreFailed, match=r"could not be stored: .*File too large"):
            store.complete(kept[0], lambda folder: (folder / "a").write_bytes(b"x" * 2 * ROOM))
        with pytest.raises(StoreFailed, match="the store of jobs cannot be written"):
            kept.extend(store.submit("video", {"filler": "x" * 4000}, {}).id for _ in range(999))
        assert len(kept) > 4

        assert store.end(kept[0], "failed", StoreFailed("the disk is full"))
        assert store.complete(kept[1], lambda folder: (folder / "a").write_bytes(b"x"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.close()

    store = JobStore(tmp_path)
    jobs = store.page(limit=10**6, is_newest_first=False)[0]
    store.close()
    assert [job.id for job in jobs] == kept
    assert [job.state for job in jobs[:3]] == ["failed", "completed", "queued"]
    assert is_sound(tmp_path)


# The checker of histories passes what is right and finds each wrong that it is there for


ASKED = [Seen("submit", request="a"), Seen("ack", "1", request="a")]
ENDED = [*ASKED, Seen("poll", "1", state="completed", progress=100)]


@pytest.mark.parametrize(
    "seen",
    [
        [],
        ENDED,
        [*ASKED, Seen("poll", "1", state="in_progress", progress=50),
         Seen("poll", "1", state="queued", progress=50),
         Seen("poll", "1", state="completed", progress=100), Seen("result", "1", digest="x"),
         Seen("result", "1", digest="x"), Seen("removed", "1"), Seen("missing", "1")],
        [Seen("submit", request="a"), Seen("poll", "1", state="failed")],  # its answer was lost
        [*ASKED, *ASKED, Seen("poll", "1", state="cancelled")],  # asked twice, one job
    ],
    ids=["nothing", "ended", "run twice and removed", "not acknowledged", "the same key"],
)  # fmt: skip
def test_a_right_history_passes(seen: list[Seen]) -> None:
    assert problems(seen) == []


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (ASKED, "1 is lost: still queued in the end"),
        ([*ENDED, Seen("missing", "1")], "1 is lost: not found"),
        ([*ENDED, Seen("poll", "1", state="queued", progress=100)],
         "1 is resurrected: completed, then queued"),
        ([*ENDED, Seen("removed", "1"), Seen("poll", "1", state="completed", progress=100)],
         "1 is resurrected: removed, and seen again by a poll"),
        ([*ENDED, Seen("submit", request="a"), Seen("ack", "2", request="a"),
          Seen("poll", "2", state="completed")], "a is duplicated: 1 and 2"),
        ([*ENDED, Seen("submit", request="b"), Seen("ack", "1", request="b")],
         "1 was given to two requests"),
        ([*ENDED, Seen("ack", "2", request="b"), Seen("poll", "2", state="failed")],
         "2 is acknowledged to b, which sent no submit"),
        ([*ENDED, Seen("result", "1", digest="x"), Seen("result", "1", digest="y")],
         "1 has two results"),
        ([*ASKED, Seen("result", "1"), Seen("poll", "1", state="failed")],
         "1 has a result while it is queued"),
        ([*ASKED, Seen("poll", "1", state="in_progress", progress=9),
          Seen("poll", "1", state="completed", progress=8)], "1 falls back from 9 % to 8 %"),
        ([*ENDED, Seen("poll", "2", state="completed")], "more jobs than requests: 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_wrong_history_is_named(seen: list[Seen], problem: str) -> None:
    assert problems(seen) == [problem]


if __name__ == "__main__":
    if room := int(sys.argv[3]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    live(Path(sys.argv[1]), int(sys.argv[2]))
