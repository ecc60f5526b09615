"""The start of an engine, where no other one is open in the process."""

import subprocess
import sys
import time

import pytest
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from torch import nn

import carpool
from carpool.config import load_settings
from carpool.engine.loop import EngineCore
from carpool.engine.model.load import load as load_pipeline
from support.engine_driver import served
from support.tiny import checkpoint


@pytest.mark.timeout(150)  # all libraries are imported in a process of its own
def test_a_start_imports_the_models_own_pipelines_says_nothing_and_leaves_verbosity() -> None:
    code = """
import sys
import carpool
from diffusers.utils import logging
before = logging.get_verbosity(), logging.is_progress_bar_enabled()
with carpool.load(sys.argv[1], device="cpu") as engine:
    assert len(engine.card.tasks) == 3, engine.card.tasks
server = {"fastapi", "uvicorn", "carpool.server", "carpool_lab"}
assert not server & sys.modules.keys(), server & sys.modules.keys()
packages = {name.split(".")[2] for name in sys.modules if name.startswith("diffusers.pipelines.")}
assert "flux" in packages, packages
assert not {"auto_pipeline", "wan", "stable_diffusion_xl", "qwenimage"} & packages, packages

carpool.load("shapes").close()
assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
assert {"load", "serve", "Engine"} <= set(dir(carpool))
"""
    command = [sys.executable, "-c", code, str(checkpoint("flux"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Tardy(EngineCore):
    """Takes its time before it changes anything."""

    def enter(self) -> None:
        time.sleep(0.2)
        super().enter()


def test_an_engine_is_there_once_it_has_changed_what_it_changes_and_leaves_nothing() -> None:
    """A caller may at once load a model of its own, which changes the same classes for a moment."""
    chosen = load_settings({"device": "cpu"})
    core = Tardy(load_pipeline(served("flux"), chosen.engine()), chosen.engine())
    plain = vars(nn.Module)["register_parameter"]

    with carpool.Engine(core, chosen):
        ours = vars(nn.Module)["register_parameter"]
        with init_empty_weights():
            assert nn.Linear(2, 2).weight.is_meta
        assert vars(nn.Module)["register_parameter"] is ours

    assert ours is not plain
    assert vars(nn.Module)["register_parameter"] is plain
