"""A pipeline of one's own behind the server: built by its worker, and again by the next one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import carpool
from carpool.errors import SettingRejected
from carpool.server.serve import name_of
from support.engine_driver import served
from support.server_process import MODEL, eventually, serving, starting

BUILD = f"""
from diffusers import DiffusionPipeline

def build():
    return DiffusionPipeline.from_pretrained({MODEL!r})

def fail():
    raise RuntimeError("no weights today")

class Counting:
    calls = 0

def count(*_):
    Counting.calls += 1

def build_with_a_counter():
    pipe = build()
    pipe.transformer.register_forward_pre_hook(count)
    return pipe
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(BUILD)
    return path


def test_a_function_of_ones_own_is_served_and_built_again_when_its_worker_dies(file: Path) -> None:
    with serving("--pipeline", f"{file}:build", model="") as server:
        first = server.draw()
        worker = server.worker()
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: server.health() == 503, 10, "its death is seen")
        eventually(lambda: server.health() == 200, 100, "it is ready again")
        again = server.draw()
        assert "FluxPipeline" in server.stdout

    assert first.status_code == again.status_code == 200
    assert first.json()["data"] == again.json()["data"]


def test_that_requests_ride_alone_is_shown_with_the_reason(file: Path) -> None:
    reason = "`count` writes `Counting.calls`"
    with serving("--pipeline", f"{file}:build_with_a_counter", model="") as server:
        tasks = set(server.get("/v1/models").json()["data"][0]["tasks"])  # walked one by one
        told = lambda: server.get("/health").json().get("private", {}).keys() == tasks  # noqa: E731
        eventually(told, 20, "they are reported")
        health, model = server.get("/health").json(), server.get("/v1/models").json()["data"][0]
        command = sys.executable, "-m", "carpool", "models", "--url", server.url
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert health["status"] == "ready"
    assert all(reason in why for why in health["private"].values())
    assert model["private"] == health["private"]
    assert all(f"{task} rides alone: {reason}" in listed for task in model["tasks"])


def test_a_function_that_fails_is_told(file: Path) -> None:
    with starting("--pipeline", f"{file}:fail", model="") as server:
        assert server.wait(100) == 1
        told = server.stderr.splitlines()[-1]

    assert told == f"carpool: --pipeline {file}:fail: RuntimeError: no weights today"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"prot": 1}, "unknown setting 'prot'; did you mean 'port'"),
        ({"dtype": "bfloat16"}, "the function loads the pipeline itself"),
    ],
)
def test_wrong_settings_of_serve_are_refused_before_anything_is_loaded(
    settings: dict[str, object], told: str
) -> None:
    with pytest.raises(SettingRejected, match=told):
        carpool.serve(served, **settings)


def test_a_pipeline_itself_cannot_be_handed_to_another_process() -> None:
    with pytest.raises(SettingRejected, match="cannot be handed to the worker process"):
        carpool.serve(served("flux"))


def test_a_function_is_named_by_its_module() -> None:
    assert name_of(served) == "support.engine_driver:served"
