"""Temporary folders: a living process keeps its own, those of dead ones go."""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from carpool.jobs.state_folder import PREFIX, ScratchFolder
from carpool.jobs.store import JobStore


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, here and in processes that are started."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_folder_is_the_users_own_and_gone_when_it_is_removed(temporary: Path) -> None:
    scratch = ScratchFolder()
    (scratch.path / "file").write_text("")

    assert scratch.path.parent == temporary
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    scratch.remove()
    assert not [*temporary.iterdir()]


def test_the_next_one_removes_what_a_dead_process_left_and_nothing_of_a_living_one(
    temporary: Path,
) -> None:
    living = ScratchFolder()
    code = (
        "import os; from carpool.jobs.store import JobStore; store = JobStore(); "
        "(store.passing / 'film.rgb').write_text(''); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    left = {*temporary.iterdir()} - {living.path}
    assert len(left) == 1

    JobStore().close()

    assert [*temporary.iterdir()] == [living.path]
    living.remove()


def test_links_files_and_folders_that_others_may_enter_are_not_touched(
    temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    elsewhere.chmod(0o700)
    (elsewhere / "precious").write_text("")
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{PREFIX}file").write_text("")
    (temporary / f"{PREFIX}open").mkdir(mode=0o755)
    before = {*temporary.iterdir()}

    ScratchFolder().remove()

    assert {*temporary.iterdir()} == before
    assert (elsewhere / "precious").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_not_touched(temporary: Path) -> None:
    foreign = temporary / f"{PREFIX}foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12345, 12345)

    ScratchFolder().remove()

    assert foreign.exists()


def test_whoever_gets_a_folder_keeps_it_however_many_begin_at_once(temporary: Path) -> None:
    def make(_: int) -> ScratchFolder:
        for _ in range(10):
            ScratchFolder().remove()
        scratch = ScratchFolder()
        (scratch.path / "mine").write_text("")
        return scratch

    with ThreadPoolExecutor(8) as pool:
        made = [*pool.map(make, range(32))]

    assert {*temporary.iterdir()} == {one.path for one in made}
    assert all((one.path / "mine").exists() for one in made)
    for one in made:
        one.remove()
