"""The arrow points downwards: who may import whom, read from the source of every file.

A new file is covered by its place: one that belongs to no group fails the test by its name.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "carpool"

GROUPS: list[set[str]] = [  # each may import from those before it, and within itself
    {
        "__init__",
        "types",
        "errors",
        "config",
        "jsonfile",
        "lora",
        "parameters",
        "pictures",
        "models",
        "shapes",
        "workload",
        "wishes",
    },
    {"schedule"},
    {"engine"},
    {"frames", "link", "manifest", "vigil", "worker", "supervise", "logs", "tracing"},
    {"media", "jobs", "metrics"},
    {"api", "background", "inprocess"},
    {"server", "bench"},
    {"cli", "cli_options", "cli_bench", "cli_jobs", "cli_simulate", "cli_tune"},
]
LEAVES = {"media", "jobs", "metrics", "logs", "tracing"}  # these import from the first group only
DOORS: dict[str, tuple[str, ...]] = {  # a library: the only places that may import it
    "greenlet": ("engine/fiber.py",),
    "torch": ("engine/", "shapes/"),
    "yaml": ("schedule/deploy.py",),
    "peft": ("engine/shadow.py", "shapes/train_lora.py"),
    "diffusers": (
        "engine/pipeline.py",
        "engine/tasks.py",
        "engine/dmd.py",
        "engine/intercept.py",
        "shapes/",
    ),
    "transformers": ("engine/", "shapes/"),
    "PIL": ("media/", "shapes/", "frames.py"),
    "av": ("media/outputs.py",),
    "uvicorn": ("server/",),
    "httptools": ("server/wire.py",),
    "prometheus_client": ("metrics.py",),
    "fastapi": ("server/",),
    "msgspec": ("frames.py",),
    "opentelemetry": ("tracing.py",),
    "sqlite3": ("jobs/database.py",),
    "click": ("cli.py", "cli_", "server/run.py"),
    "httpx2": ("bench/client.py", "media/remote.py", "cli_jobs.py"),
    "matplotlib": ("bench/plot.py", "bench/curves.py"),
}

FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def module_of(file: Path) -> str:
    parts = ("carpool", *file.with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(file) for file in FILES}


def group_of(module: str) -> int:
    part = [*module.split("."), "__init__"][1]
    groups = [number for number, group in enumerate(GROUPS) if part in group]
    assert groups, f"{module} belongs to no group: give it a place in tests/test_imports.py"
    return groups[0]


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import, wherever it stands, but for those that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        else:
            yield from statements(node)


@cache
def imports_of(file: Path) -> set[str]:
    """Modules that a file imports, by their full names."""
    names: set[str] = set()
    for node in statements(ast.parse((SOURCE / file).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.module is not None, f"{file}: a relative import"
            assert not node.level, f"{file}: a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inside & MODULES) or {node.module}
    return names


def ours(file: Path) -> set[str]:
    return {name for name in imports_of(file) if name.split(".")[0] == "carpool"}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_point_downwards(file: Path) -> None:
    group = group_of(module_of(file))

    wrong = {name for name in ours(file) if group_of(name) > group}

    assert not wrong, f"{file} imports upwards"


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.with_suffix("").parts[0] in LEAVES], ids=str
)
def test_leaves_know_the_first_group_only(file: Path) -> None:
    own = file.with_suffix("").parts[0]
    others = {name for name in ours(file) if name.split(".")[1:2] != [own]}

    assert {group_of(name) for name in others} <= {0}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_library_has_one_door(file: Path) -> None:
    libraries = {name.split(".")[0] for name in imports_of(file)}

    for library in libraries & DOORS.keys():
        assert file.as_posix().startswith(DOORS[library]), f"{file} imports {library}"


def test_the_first_group_has_no_torch_although_shapes_is_trained_with_it() -> None:
    assert not ours(Path("shapes/__init__.py")) - {"carpool"}
    for file in FILES:
        if file.name == "__init__.py":
            assert not {name.split(".")[0] for name in imports_of(file)} & DOORS.keys(), file


def test_nothing_that_serves_imports_what_trains() -> None:
    for file in FILES:
        if file.parts[0] != "shapes":
            assert not [name for name in ours(file) if name.startswith("carpool.shapes.")], file


def test_the_front_and_the_command_line_load_no_torch() -> None:
    code = (
        "import carpool.cli, carpool.server.run, carpool.worker, sys; "
        "print(sorted({'torch', 'diffusers', 'transformers', 'carpool.engine'} & {*sys.modules}))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_checks_see_what_they_are_to_see() -> None:
    assert "carpool.types" in imports_of(Path("engine/loop.py"))
    assert "carpool.engine.pipeline" in imports_of(Path("engine/loop.py"))
    assert "greenlet" in imports_of(Path("engine/fiber.py"))
    assert "diffusers" not in imports_of(Path("api.py"))  # for type checkers only
    assert "carpool.engine.loop" in imports_of(Path("worker.py"))  # inside of a function
    with pytest.raises(AssertionError, match=r"carpool\.new belongs to no group"):
        group_of("carpool.new")
