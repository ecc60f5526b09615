"""`.ci/install.py`: what `make` installs with. Nothing here leaves the machine."""

import ensurepip
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "install.py"
WHEELS = Path(ensurepip.__file__).parent / "_bundled"
HAS_WHEELS = any(WHEELS.glob("pip-*.whl"))


def install(room: Path, uv: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Install an empty lock with this shell script as uv."""
    (room / "requirements.lock").touch()
    (room / "uv").write_text(f"#!/bin/sh\n{uv}\n")
    (room / "uv").chmod(0o755)
    return subprocess.run(
        [sys.executable, SCRIPT, "environment", "requirements.lock"],
        cwd=room,
        env={**os.environ, "PATH": f"{room}:/usr/bin:/bin", **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_uv_hears_what_pip_is_told_and_the_parts_are_timed(tmp_path: Path) -> None:
    done = install(
        tmp_path,
        'echo "$@ from $UV_FIND_LINKS at $UV_DEFAULT_INDEX" > asked',
        PIP_FIND_LINKS="/wheels",
        PIP_INDEX_URL="https://packages.invalid/simple",
    )

    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text()
    assert "-r requirements.lock" in asked
    assert "from /wheels at https://packages.invalid/simple" in asked
    parts = [line.split(":")[0] for line in done.stderr.splitlines() if line[0] != " "]
    assert parts == ["environment", "uv", "libraries"]


@pytest.mark.skipif(not HAS_WHEELS, reason="this Python has pip's wheel elsewhere")
def test_pip_installs_where_uv_fails(tmp_path: Path) -> None:
    done = install(
        tmp_path,
        "echo cannot; exit 2",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(WHEELS),
        PIP_NO_COMPILE="1",
    )

    assert done.returncode == 0, done.stderr
    assert "cannot" in done.stderr
    assert (tmp_path / "environment" / "bin" / "pip").exists()


def test_a_failure_shows_its_last_lines_and_no_traceback(tmp_path: Path) -> None:
    done = install(tmp_path, "exit 2", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))

    assert done.returncode == 1
    assert "No matching distribution found for pip" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("target", ["test-pythons", "test-versions"])
def test_the_tests_that_a_target_names_are_there(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target],
        cwd=SCRIPT.parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip

    paths = [word for word in done.stdout.split() if word.startswith("tests/")]
    assert paths
    assert all((SCRIPT.parents[1] / path).exists() for path in paths)
