"""What `import carpool` gives: its names, what it costs, and an end that leaves nothing behind."""

import ast
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool.errors import Cancelled, SettingRejected
from support.engine_driver import served
from support.tiny import ARGUMENTS

SD15 = ARGUMENTS["sd15"]


def test_leaving_the_block_ends_the_thread_and_gives_the_modules_back() -> None:
    pipe, threads = served("sd15"), set(threading.enumerate())  # one of them may be about to end
    with carpool.load(pipe, device="cpu") as engine:
        handle = engine.submit("a cat", **SD15 | {"num_inference_steps": 900})
        assert next(event for event in handle.events() if event.kind == "step")
        assert set(threading.enumerate()) - threads
        assert "_compiled_call_impl" in pipe.unet.__dict__

    assert not set(threading.enumerate()) - threads
    assert not {"forward", "_compiled_call_impl"} & pipe.unet.__dict__.keys()
    assert "decode" not in pipe.vae.__dict__
    with pytest.raises(Cancelled, match="the engine was closed"):
        handle.result(10)
    engine.close()  # a second time is harmless


def test_an_unknown_setting_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingRejected, match="unknown setting 'max_batch'; did you mean 'max_b"):
        carpool.load(served("sd15"), max_batch=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("setting", [{"dtype": "bfloat16"}, {"revision": "main"}], ids=str)
def test_a_setting_that_a_given_pipeline_overrides_is_refused(setting: dict[str, Any]) -> None:
    [name] = setting

    with pytest.raises(SettingRejected, match=f"{name}='.*': the given pipeline is loaded already"):
        carpool.load(served("sd15"), **setting)


def test_every_public_name_is_there() -> None:
    for name in carpool.__all__:
        assert getattr(carpool, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        carpool.nothing  # noqa: B018


def test_the_package_is_the_command_line_too() -> None:
    asked = [sys.executable, "-m", "carpool", "--version"]

    done = subprocess.run(asked, capture_output=True, text=True, check=True)

    assert done.stdout == f"python -m carpool, version {carpool.__version__}\n"


# The examples run as they stand


EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_asyncio_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "asyncio_requests.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
    assert "step 12 of 12" in done.stdout
    assert "cancelled" in done.stdout
    assert len(list(tmp_path.glob("*.png"))) == 2


def shown(cell: dict[str, Any], names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; returns the value of its last line."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body[-1]
    tree.body = tree.body[:-1] if isinstance(last, ast.Expr) else tree.body
    exec(compile(tree, "cell", "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_the_notebook_runs_and_its_outputs_show_themselves() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    names: dict[str, Any] = {}

    values = [shown(cell, names) for cell in notebook["cells"] if cell["cell_type"] == "code"]

    outputs = [value for value in values if isinstance(value, carpool.Output)]
    assert len(outputs) == 3
    for output in outputs:
        html = output._repr_html_() or ""
        assert html.startswith('<img src="data:image/png;base64,')
        assert f"seed {output.seed}, " in html
    assert not any(cell.get("outputs") for cell in notebook["cells"])
