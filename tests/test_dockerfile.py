"""The image's recipe: a linter finds nothing, what it copies is there, what it starts is a command.

No image is built here. Hadolint reads the Dockerfile and the shell in it.
"""

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from carpool.cli.main import cli

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text()
LINES = [
    " ".join(line.split())
    for line in re.sub(r"\\\n(\s*#.*\n)*", " ", TEXT).splitlines()
    if line and not line.startswith("#")
]


def lint(text: str) -> list[str]:
    """The codes of what the linter finds, however slight."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", "--format", "json", "-"], input=text, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert not done.stderr
    return [one["code"] for one in json.loads(done.stdout)]


def values(instruction: str) -> list[str]:
    return [line.removeprefix(f"{instruction} ") for line in LINES if line.startswith(instruction)]


def test_the_linter_finds_nothing() -> None:
    assert lint(TEXT) == []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("RUN cd /tmp", "DL3003"), ("RUN echo $1 | grep $(ls *)", "SC2035"),
        ("COPY a b c", "DL3021"), ("USER root", "DL3002"), ("RUNN echo", "DL1000"),
    ],
)  # fmt: skip
def test_the_linter_finds_what_is_wrong(line: str, code: str) -> None:
    assert code in lint(f"{TEXT}\n{line}\n")


def test_the_base_is_a_build_argument_of_both_stages() -> None:
    assert LINES[0].startswith("ARG BASE=")
    assert [value.split()[0] for value in values("FROM")] == ["${BASE}", "${BASE}"]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copied = [
        source for value in values("COPY") if "--from" not in value for source in value.split()[:-1]
    ]

    assert "*" in ignore
    assert set(copied) == kept
    for source in copied:
        assert (ROOT / source).exists(), source
    assert not any(fnmatch(source, "*__pycache__*") for source in copied)


def test_the_lock_names_every_library_that_the_image_installs_by_it() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    project = (ROOT / "pyproject.toml").read_text()

    [extras] = [value for value in values("ARG") if value.startswith("EXTRAS=")]
    for extra in extras.removeprefix("EXTRAS=").split(","):
        [wanted] = re.findall(rf"^{extra} = \[([^]]*)\]", project, re.MULTILINE)
        for name in re.findall(r'"([A-Za-z0-9_-]+)', wanted):
            assert re.search(rf"^{name}==", lock, re.MULTILINE | re.IGNORECASE), name
    assert re.search(r"^torch==", lock, re.MULTILINE)


def test_what_it_starts_is_understood() -> None:
    [entry], [command] = values("ENTRYPOINT"), values("CMD")
    assert json.loads(entry) == ["carpool"]
    name, *arguments = json.loads(command)

    context = cli.commands[name].make_context(name, arguments)

    assert context.params["host"] == "0.0.0.0"  # of the container's own network


def test_it_does_not_run_as_root() -> None:
    [user] = values("USER")

    assert user.isdecimal()
    assert int(user) > 0
