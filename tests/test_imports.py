"""The arrow points downwards: who may import whom, read from the source of every file.

A new file is covered by its place: one that belongs to no room fails the test by its name.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

ROOMS: list[set[str]] = [  # each may import from those before it, and within itself
    {
        "carpool",
        "carpool.types",
        "carpool.errors",
        "carpool.validation",
        "carpool.config",
        "carpool.jsonfile",
    },
    {"carpool.models"},
    {"carpool.request"},
    {"carpool.schedule"},
    {"carpool.telemetry"},
    {"carpool.engine"},
    {"carpool.worker"},
    {"carpool.media", "carpool.jobs"},
    {"carpool.python"},
    {"carpool.server"},
    {"carpool.cli"},
    {"carpool_lab"},
]
LEAVES = {"carpool.media", "carpool.jobs", "carpool.telemetry"}  # they import nouns only
NOUNS = ROOMS[0] | ROOMS[1] | ROOMS[2]
DOORS: dict[str, tuple[str, ...]] = {  # a library: the only places that may import it
    "greenlet": ("carpool/engine/fiber.py",),
    "torch": ("carpool/engine/", "carpool_lab/tune/"),
    "yaml": ("carpool/schedule/peers/vllm_omni_deploy.py",),
    "peft": ("carpool/engine/adapters/reader.py",),
    "diffusers": ("carpool/engine/model/", "carpool/engine/intercept.py"),
    "transformers": ("carpool/engine/",),
    "PIL": ("carpool/media/", "carpool/worker/protocol.py"),
    "av": ("carpool/media/outputs.py",),
    "uvicorn": ("carpool/server/",),
    "httptools": ("carpool/server/transport/http_protocol.py",),
    "prometheus_client": ("carpool/telemetry/metrics.py",),
    "fastapi": ("carpool/server/",),
    "msgspec": ("carpool/worker/protocol.py", "carpool/validation.py", "carpool/schedule/peers/"),
    "opentelemetry": ("carpool/telemetry/tracing.py",),
    "sqlite3": ("carpool/jobs/database.py",),
    "click": ("carpool/cli/", "carpool/server/run.py", "carpool_lab/"),
    "httpx2": ("carpool_lab/load/client.py", "carpool/media/remote.py", "carpool/cli/jobs.py"),
    "matplotlib": ("carpool_lab/load/plot.py", "carpool_lab/load/curves.py"),
}

FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def module_of(file: Path) -> str:
    return ".".join(part for part in file.with_suffix("").parts if part != "__init__")


MODULES = {module_of(file) for file in FILES}


def room_of(module: str) -> str:
    lab, *_ = parts = module.split(".")
    return lab if lab == "carpool_lab" else ".".join(parts[:2])


def floor_of(module: str) -> int:
    floors = [number for number, rooms in enumerate(ROOMS) if room_of(module) in rooms]
    assert floors, f"{module} belongs to no room: give it a place in tests/test_imports.py"
    return floors[0]


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
    return {name for name in imports_of(file) if name.split(".")[0] in ("carpool", "carpool_lab")}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_point_downwards(file: Path) -> None:
    floor = floor_of(module_of(file))

    wrong = {name for name in ours(file) if floor_of(name) > floor}

    assert not wrong, f"{file} imports upwards"


@pytest.mark.parametrize("file", [f for f in FILES if room_of(module_of(f)) in LEAVES], ids=str)
def test_leaves_know_nouns_only(file: Path) -> None:
    own = room_of(module_of(file))

    assert {room_of(name) for name in ours(file)} <= NOUNS | {own}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_library_has_one_door(file: Path) -> None:
    libraries = {name.split(".")[0] for name in imports_of(file)}

    for library in libraries & DOORS.keys():
        assert file.as_posix().startswith(DOORS[library]), f"{file} imports {library}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    # a package's own docstring is no code: who imports `carpool` alone asks for its version
    graph = {module_of(file): ours(file) - {module_of(file), "carpool"} for file in FILES}

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" <- ".join(circle.args[1]))


def test_packages_import_nothing_heavy() -> None:
    for file in FILES:
        if file.name == "__init__.py":
            assert not {name.split(".")[0] for name in imports_of(file)} & DOORS.keys(), file


def test_the_front_and_the_command_line_load_no_torch() -> None:
    code = (
        "import carpool.cli.main, carpool.server.run, carpool.worker.process, sys; "
        "print(sorted({'torch', 'diffusers', 'transformers', 'carpool.engine'} & {*sys.modules}))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_checks_see_what_they_are_to_see() -> None:
    loop = Path("carpool/engine/loop.py")
    assert "carpool.types" in imports_of(loop)
    assert "carpool.engine.model.pipeline" in imports_of(loop)
    assert "greenlet" in imports_of(Path("carpool/engine/fiber.py"))
    assert "carpool.engine.loop" in imports_of(Path("carpool/worker/process.py"))  # in a function
    with pytest.raises(AssertionError, match=r"carpool\.new\.thing belongs to no room"):
        floor_of("carpool.new.thing")
