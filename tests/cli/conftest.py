"""Runs the `carpool` command in the test's own process."""

import sys
from pathlib import Path
from typing import Any

import pytest

from carpool.cli import main as command_line
from support.command_line import Ended, Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run `carpool ARGUMENTS` in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["carpool", *arguments])
        capsys.readouterr()
        status: Any = 0
        try:
            command_line.main()
        except SystemExit as end:
            status = end.code
        return Ended(status or 0, *capsys.readouterr())

    return run
