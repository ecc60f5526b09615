"""A state folder is used only if it is ours, and only what was made here is ever removed."""

import inspect
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from carpool.errors import PipelineFailed, StoreFailed
from carpool.jobs.state_folder import LOCK, LOG, MARKER
from carpool.jobs.store import JobStore
from support.server_process import ended

Tree = dict[str, tuple[Any, ...]]


def tree(folder: Path) -> Tree:
    """All of a folder: names, permissions, times of changes, contents."""
    found: Tree = {}
    for path in (folder, *folder.rglob("*")):
        seen = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        name = str(path.relative_to(folder))
        found[name] = seen.st_mode, seen.st_mtime_ns, content
    return found


def refused(folder: Path, says: str) -> None:
    """Opening it fails, says why, and changes nothing: twice."""
    before = tree(folder)
    for _ in range(2):
        with pytest.raises(StoreFailed, match=says):
            JobStore(folder)
        assert tree(folder) == before


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def completed(store: JobStore, content: bytes = b"picture") -> str:
    """A job with a result; gives its id."""
    job = store.submit("image", {}, {}, inputs={"in": b"input"})
    store.take(1)
    store.complete(job.id, lambda folder: (folder / "a").write_bytes(content))
    return job.id


def result(store: JobStore, job_id: str) -> bytes:
    path = store.file(store.get(job_id), "a")
    assert path is not None
    return path.read_bytes()


@pytest.fixture
def used(tmp_path: Path) -> tuple[Path, str]:
    """A folder of a store that was closed, with a job that has a result."""
    store = JobStore(tmp_path / "state")
    job_id = completed(store)
    store.close()
    return store.folder, job_id


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder whose process was killed, with several jobs that have results."""
    folder = tmp_path_factory.mktemp("died") / "state"
    source = f"{inspect.getsource(completed)}\nstore = JobStore(Path(sys.argv[1]))\n"
    code = (
        "import os, sys; from pathlib import Path; from carpool.jobs.store import JobStore\n"
        f"{source}print(*(completed(store) for _ in range(5)), flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    return folder, done.stdout.split()


@pytest.fixture
def killed(died: tuple[Path, list[str]], tmp_path: Path) -> tuple[Path, list[str]]:
    """A copy of it, for one test."""
    folder, jobs = died
    return Path(shutil.copytree(folder, tmp_path / "state")), jobs


# Folders of others

PROJECT = {
    "files/2025-invoices/a.txt": b"a", "inputs/raw/b.bin": b"b", "passing/x/c": b"c",
    "links/notes.part": b"n", "links/secret": b"s",
}  # fmt: skip


@pytest.mark.parametrize(
    "files",
    [
        PROJECT,
        {"files/image_0123456789abcdef0123456789abcdef/0.png": b"as ours are called"},
        {"notes.txt": b"n"},
        {".gitkeep": b""},
        {"lock": b""},
        PROJECT | {"jobs.sqlite": b""},
        PROJECT | {"jobs.sqlite": b"SQLite format 3\0 and more"},
        PROJECT | {"jobs.sqlite": b"no database" * 99},
    ],
    ids=lambda files: next(reversed(files)),
)
def test_a_folder_of_somebody_elses_is_refused_and_stays_as_it_is(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    put(tmp_path / "project", files)
    (tmp_path / "project").chmod(0o755)

    refused(tmp_path / "project", "files that are not Carpool's .* give an empty folder, or one")


def test_a_database_of_somebody_elses_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "jobs.sqlite") as db:
        db.execute("CREATE TABLE jobs (id, salary)")
    db.close()

    refused(tmp_path, "not Carpool's")


def test_the_server_says_so_before_it_loads_anything(tmp_path: Path) -> None:
    put(tmp_path, PROJECT)
    before = tree(tmp_path)

    status, said = ended("serve", "--port", "0", "--state-dir", str(tmp_path))

    assert (status, tree(tmp_path)) == (1, before)
    assert "not Carpool's (files, inputs, links, ...)" in said


@pytest.mark.parametrize("names", [[], ["lost+found"]])
def test_an_empty_folder_is_taken_and_closed_to_others(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    tmp_path.chmod(0o755)

    JobStore(tmp_path).close()

    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert "carpool serve" in (tmp_path / MARKER).read_text()
    JobStore(tmp_path).close()


@pytest.mark.parametrize(
    "name", ["files", "inputs", "passing", "links", LOCK, "jobs.sqlite", LOG, MARKER]
)
def test_nothing_is_reached_through_a_symbolic_link(
    tmp_path: Path, used: tuple[Path, str], name: str
) -> None:
    folder, _ = used
    elsewhere = tmp_path / "elsewhere"
    if (folder / name).exists():
        (folder / name).rename(elsewhere)
    else:
        elsewhere.write_bytes(b"")
    (folder / name).symlink_to(elsewhere)
    before = tree(tmp_path)

    refused(folder, f"{name} in it is a symbolic link")

    assert tree(tmp_path) == before


def test_a_link_to_the_folder_itself_is_followed(tmp_path: Path, used: tuple[Path, str]) -> None:
    folder, job_id = used
    (tmp_path / "link").symlink_to(folder)

    store = JobStore(tmp_path / "link")

    assert result(store, job_id) == b"picture"
    store.close()


def test_what_others_put_into_a_state_folder_stays_there(used: tuple[Path, str]) -> None:
    folder, job_id = used
    theirs = PROJECT | {
        "files/image_1/a": b"a", "files/IMAGE_0123456789abcdef0123456789abcdef.part/a": b"a",
        "inputs/image_0123456789abcdef0123456789abcdef": b"a file", "passing/tmpdir/a": b"a",
        "passing/tmp_film.rgb": b"a", "notes.txt": b"n",
    }  # fmt: skip
    del theirs["links/secret"]
    put(folder, theirs)
    (folder / "files" / f"image_{'f' * 32}.part").symlink_to(folder / "files" / "2025-invoices")

    for _ in range(2):
        store = JobStore(folder)
        completed(store)
        store.close()
    store = JobStore(folder)
    store.remove(job_id)
    store.close()

    assert {name: (folder / name).read_bytes() for name in theirs} == theirs


# Stores that are not whole


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_a_lost_database_is_told_and_costs_no_result(
    used: tuple[Path, str], content: bytes | None
) -> None:
    folder, job_id = used
    kept = (folder / "jobs.sqlite").rename(folder.parent / "backup")
    if content is not None:
        (folder / "jobs.sqlite").write_bytes(content)

    refused(folder, "jobs.sqlite is missing or empty.* restore it.* or move .* to start afresh")

    kept.rename(folder / "jobs.sqlite")
    store = JobStore(folder)
    assert result(store, job_id) == b"picture"
    store.close()


@pytest.mark.parametrize("at", [0, 5000, 20_000], ids=["header", "schema", "rows"])
def test_a_damaged_database_is_told_and_costs_no_result(used: tuple[Path, str], at: int) -> None:
    folder, job_id = used
    whole = (folder / "jobs.sqlite").read_bytes()
    (folder / "jobs.sqlite").write_bytes(whole[:at] + b"\xff" * 4096 + whole[at + 4096 :])

    before = tree(folder / "files")
    with pytest.raises(StoreFailed, match=r"jobs.sqlite is damaged.* restore it"):
        JobStore(folder)

    assert tree(folder / "files") == before
    (folder / "jobs.sqlite").write_bytes(whole)
    store = JobStore(folder)
    assert result(store, job_id) == b"picture"
    store.close()


def test_a_store_without_a_database_and_without_results_begins_anew(tmp_path: Path) -> None:
    JobStore(tmp_path).close()
    (tmp_path / "jobs.sqlite").unlink()

    JobStore(tmp_path).close()


def test_a_lost_log_of_a_killed_server_is_told(killed: tuple[Path, list[str]]) -> None:
    folder, jobs = killed
    kept = (folder / LOG).rename(folder.parent / LOG)

    refused(folder, "jobs.sqlite-wal is missing: the last server was killed.* or remove lock")

    kept.rename(folder / LOG)
    store = JobStore(folder)
    assert [result(store, job) for job in jobs] == [b"picture"] * 5
    store.close()


def test_results_that_a_lost_log_knew_of_stay(
    killed: tuple[Path, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, jobs = killed
    (folder / LOG).unlink()
    (folder / LOCK).unlink()

    store = JobStore(folder)
    store.close()

    assert "5 folders in" in caplog.text
    assert [(folder / "files" / job / "a").read_bytes() for job in jobs] == [b"picture"] * 5


@pytest.mark.parametrize("at", [0, 40, 9000], ids=["header", "first frame", "second page"])
def test_a_damaged_log_of_a_killed_server_is_told(killed: tuple[Path, list[str]], at: int) -> None:
    folder, jobs = killed
    whole = (folder / LOG).read_bytes()
    (folder / LOG).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])

    refused(folder, r"jobs.sqlite-wal is damaged: \d+ changes of jobs cannot be read")

    (folder / LOG).write_bytes(whole)
    store = JobStore(folder)
    assert [result(store, job) for job in jobs] == [b"picture"] * 5
    store.close()


def test_a_log_that_ends_within_a_transaction_is_as_power_loss_leaves_it(
    killed: tuple[Path, list[str]],
) -> None:
    folder, jobs = killed
    whole = (folder / LOG).read_bytes()
    (folder / LOG).write_bytes(whole[:-2000])

    store = JobStore(folder)

    assert [result(store, job) for job in jobs[:4]] == [b"picture"] * 4
    assert (folder / "files" / jobs[4] / "a").read_bytes() == b"picture"  # it is drawn anew
    store.close()


def test_an_older_backup_of_the_database_costs_no_result(
    used: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, first = used
    backup = (folder / "jobs.sqlite").read_bytes()
    store = JobStore(folder)
    second = completed(store, b"another")
    store.close()
    (folder / "jobs.sqlite").write_bytes(backup)

    for _ in range(2):
        store = JobStore(folder)
        assert result(store, first) == b"picture"
        store.close()

    assert (folder / "files" / second / "a").read_bytes() == b"another"
    assert f"such as {second}" in caplog.text


def test_a_copy_is_a_store_of_its_own(tmp_path: Path, used: tuple[Path, str]) -> None:
    folder, job_id = used
    shutil.copytree(folder, tmp_path / "copy")

    stores = [JobStore(folder), JobStore(tmp_path / "copy")]
    stores[0].remove(job_id)

    assert result(stores[1], job_id) == b"picture"
    for store in stores:
        store.close()


def test_a_store_of_an_older_version_goes_on(used: tuple[Path, str]) -> None:
    folder, job_id = used
    (folder / MARKER).unlink()
    with sqlite3.connect(folder / "jobs.sqlite") as db:
        db.execute("PRAGMA application_id = 0")
        db.execute("DROP INDEX by_size")
    db.close()

    store = JobStore(folder)

    assert result(store, job_id) == b"picture"
    assert (folder / MARKER).exists()
    store.close()
    with sqlite3.connect(folder / "jobs.sqlite") as db:
        db.execute("PRAGMA user_version = 2")
    db.close()
    refused(folder, "a newer Carpool wrote it")


def test_of_two_that_start_at_once_in_a_new_folder_one_gets_it(tmp_path: Path) -> None:
    def start(number: int) -> JobStore | str:
        try:
            return JobStore(tmp_path / "state")
        except StoreFailed as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(start, range(8)))

    stores = [one for one in told if isinstance(one, JobStore)]
    for store in stores:
        store.close()
    assert len(stores) == 1
    assert all("another server uses it" in one for one in told if isinstance(one, str))


# Crashes on the way


@pytest.mark.parametrize("name", ["files", "inputs"])
def test_a_removal_that_was_interrupted_is_taken_back_or_ended(tmp_path: Path, name: str) -> None:
    store = JobStore(tmp_path)
    job_id = completed(store) if name == "files" else None
    waiting = store.submit("image", {}, {}, inputs={"in": b"input"}).id
    store.close()
    folder = tmp_path / name
    (folder / (job_id or waiting)).rename(folder / f"{job_id or waiting}.part")  # before its row
    (folder / f"image_{'0' * 32}.part").mkdir()  # after its row

    store = JobStore(tmp_path)

    assert [path.name for path in folder.iterdir()] == [job_id or waiting]
    assert job_id is None or result(store, job_id) == b"picture"
    assert store.input(waiting, "in") == b"input"
    store.close()


@pytest.mark.parametrize("break_", ["rename", "rows"])
def test_a_removal_that_the_disk_refuses_changes_nothing(
    used: tuple[Path, str], break_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job_id = used
    store = JobStore(folder)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error") if break_ == "rename" else StoreFailed("full")

    with monkeypatch.context() as patch:
        if break_ == "rename":
            patch.setattr(os, "rename", refuse)
        else:
            patch.setattr(store._db, "writing", refuse)
        with pytest.raises(StoreFailed, match="could not be removed"):
            store.remove(job_id)

    assert result(store, job_id) == b"picture"
    store.remove(job_id)
    assert not list((folder / "files").iterdir())
    store.close()


def test_a_row_that_names_a_path_reaches_nothing(tmp_path: Path, used: tuple[Path, str]) -> None:
    folder, _ = used
    put(tmp_path, {"theirs/a": b"theirs"})
    with sqlite3.connect(folder / "jobs.sqlite") as db:
        db.execute("UPDATE jobs SET id = '../../theirs', state = 'queued'")
    db.close()

    store = JobStore(folder)
    [job] = store.take(1)
    with pytest.raises(StoreFailed, match="is no id of a job"):
        store.complete(job.id, lambda folder: None)
    assert store.input(job.id, "a") is None
    store.end(job.id, "failed", PipelineFailed("it broke"))
    store.remove(job.id)
    store.close()

    assert (tmp_path / "theirs" / "a").read_bytes() == b"theirs"
