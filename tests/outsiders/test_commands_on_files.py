"""Commands that are given a file that is no model say so in one line, and end with 1."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from carpool.cli import main as command_line
from support import original_names
from support.engine_driver import plain
from support.prepared import own_weights
from support.server_process import starting
from support.tiny import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
ENDED = tuple[int, str]


def adapter(file: Path) -> None:
    names = (f"transformer.x.lora_{part}.weight" for part in "AB")
    save_file({name: torch.zeros(2, 2) for name in names}, file)


def of_one_encoder(file: Path) -> None:
    """A whole model of which half an encoder is there."""
    pipe = plain("sdxl")
    weights = original_names.whole(pipe.components)
    part = "conditioner.embedders.0.transformer.text_model.encoder"
    save_file({name: one for name, one in weights.items() if not name.startswith(part)}, file)


def denoiser(file: Path) -> None:
    pipe = plain("flux")
    save_file(own_weights(pipe.transformer), file)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path) -> Callable[..., ENDED]:
    """Run `carpool ARGUMENTS` here; what it ended with, and its lines on standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> ENDED:
        monkeypatch.setattr(sys, "argv", ["carpool", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line.main()
        return int(end.value.code or 0), capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    ("write", "base", "told"),
    [
        (adapter, "flux", "it is an adapter (it has transformer.x.lora_A.weight), and no model"),
        (of_one_encoder, "sdxl", "it lacks encoder.layers.0."),
    ],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_bad_model_of_one_file_is_refused_in_one_line(
    command: str,
    write: Callable[[Path], None],
    base: str,
    told: str,
    run: Callable[..., ENDED],
    tmp_path: Path,
) -> None:
    file = tmp_path / "file.safetensors"
    write(file)
    model = ["--device", "cpu", "--model-config", str(checkpoint(base))]

    if command == "serve":
        with starting(*model, model=str(file)) as server:
            status, lines = server.wait(100), server.stderr
    else:
        status, lines = run("generate", "a cat", "--model", str(file), *model)

    assert status == 1
    assert "Traceback" not in lines
    [line] = [line for line in lines.splitlines() if line.startswith("carpool: ")]
    assert told in line


@pytest.mark.parametrize(
    ("write", "told"), [(adapter, "it is an adapter"), (denoiser, "is a file of weights: name the")]
)
def test_a_plan_of_a_file_says_what_it_is(
    write: Callable[[Path], None], told: str, run: Callable[..., ENDED], tmp_path: Path
) -> None:
    write(tmp_path / "file.safetensors")

    status, lines = run("plan", str(tmp_path / "file.safetensors"))

    assert status == 1
    assert told in lines
    assert len(lines.splitlines()) == 1
