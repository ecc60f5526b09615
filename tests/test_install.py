"""`.ci/install.py`: what `make` installs with. Nothing here leaves the machine."""

import ensurepip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.server_process import PATIENCE_S, eventually

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


def test_uv_hears_pips_settings_parts_are_timed_and_libraries_compiled(tmp_path: Path) -> None:
    peft = tmp_path / "environment/lib/python3/site-packages/peft"
    done = install(
        tmp_path,
        f'install -D /dev/null {peft}/a.py; echo "$@ from $UV_FIND_LINKS $UV_DEFAULT_INDEX" >asked',
        PYTHONDONTWRITEBYTECODE="",
        PIP_FIND_LINKS="/wheels",
        PIP_INDEX_URL="https://packages.invalid/simple",
    )

    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text()
    assert "-r requirements.lock" in asked
    assert "from /wheels https://packages.invalid/simple" in asked
    parts = [line.split(":")[0] for line in done.stderr.splitlines() if line[0] != " "]
    assert parts == ["environment", "uv", "libraries"]
    eventually(lambda: any(peft.rglob("a.*.pyc")), PATIENCE_S, "it is compiled")


@pytest.mark.skipif(not HAS_WHEELS, reason="this Python has pip's wheel elsewhere")
def test_pip_installs_where_uv_fails(tmp_path: Path) -> None:
    options = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(WHEELS), "PIP_NO_COMPILE": "1"}
    done = install(tmp_path, "echo cannot; exit 2", **options)

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

    words = [word for word in done.stdout.split() if word.startswith("tests/")]
    assert words
    for path, _, name in (word.partition("::") for word in words):
        assert (SCRIPT.parents[1] / path).exists()
        assert not name or f"def {name}(" in (SCRIPT.parents[1] / path).read_text()
