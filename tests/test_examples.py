"""The examples run as they stand."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import carpool

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
