"""The direction of imports, read from the source of every file.

Between packages an import points downwards in `ROOMS`; inside of a package files and folders form
no circle; a library is imported where `DOORS` says; what a module docstring claims about imports
is checked in `CLAIMS`; tests do not import one another. A new file is covered by its place: one
that belongs to no room fails by its name.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

import pytest

SOURCE = Path(__file__).parents[1] / "src"

ROOMS: list[set[str]] = [  # each may import from those before it, and within itself
    {
        "carpool",
        "carpool.artifacts",
        "carpool.types",
        "carpool.error_text",
        "carpool.errors",
        "carpool.config",
        "carpool.settings",
        "carpool.jsonfile",
    },
    {"carpool.models"},
    {"carpool.request"},
    {"carpool.telemetry"},
    {"carpool.schedule"},
    {"carpool.preflight"},
    {"carpool.engine"},
    {"carpool.worker"},
    {"carpool.fleet"},
    {"carpool.media", "carpool.jobs"},
    {"carpool.python"},
    {"carpool.server"},
    {"carpool.cli"},
    {"carpool.__main__"},
    {"carpool_lab"},
]
LEAVES = {"carpool.media", "carpool.jobs", "carpool.telemetry"}  # they import nouns only
NOUNS = ROOMS[0] | ROOMS[1] | ROOMS[2]
DOORS: dict[str, tuple[str, ...]] = {  # a library: the only places that may import it
    "greenlet": ("carpool/engine/fiber.py",),
    "ray": ("carpool/fleet/ray.py",),
    "torch": ("carpool/engine/", "carpool_lab/check/", "carpool_lab/plan/"),
    "yaml": ("carpool/settings/yaml_file.py", "carpool/engine/model/hunyuan3d.py"),
    "peft": ("carpool/engine/adapters/parts.py", "carpool/engine/adapters/loading.py"),
    "diffusers": (
        "carpool/engine/model/",
        "carpool/engine/overlay/",
        "carpool/engine/group/",
        "carpool/engine/weights/groups.py",
        "carpool/engine/serialization.py",
        "carpool_lab/plan/",
    ),
    "transformers": ("carpool/engine/", "carpool_lab/plan/"),
    "PIL": ("carpool/media/", "carpool/worker/encoding.py"),
    "av": ("carpool/media/outputs.py",),
    "uvicorn": ("carpool/server/",),
    "httptools": ("carpool/server/transport/http_protocol.py",),
    "prometheus_client": ("carpool/telemetry/",),
    "fastapi": ("carpool/server/",),
    "jinja2": ("carpool/engine/model/text_pipeline.py", "carpool/server/routes/docs_page.py"),
    "msgspec": (
        "carpool/worker/encoding.py",
        "carpool/worker/protocol.py",
        "carpool/worker/message_handler.py",
        "carpool/fleet/moves.py",
        "carpool/fleet/waiting_requests.py",
        "carpool/engine/",
        "carpool/jobs/journal_files.py",
        "carpool/settings/rules.py",
        "carpool/settings/peers/",
        "carpool/schedule/",
        "carpool_lab/",
    ),
    "opentelemetry": ("carpool/telemetry/tracing.py",),
    "sqlite3": ("carpool/jobs/database.py",),
    "click": (
        "carpool/cli/",
        "carpool/server/startup.py",
        "carpool/server/greeting.py",
        "carpool_lab/",
    ),
    "httpx2": (
        "carpool_lab/load/client.py",
        "carpool/media/fetch_url.py",
        "carpool/engine/model/language_server.py",
        "carpool/cli/",
    ),
    "rich": ("carpool/cli/",),
    "matplotlib": ("carpool_lab/plot.py",),
}

# Folders of one package that still import each other in a circle: an arrow here is ignored by the
# test of circles, and fails another one as soon as it is gone.
Check = tuple[Literal["only", "never", "not directly"], tuple[str, ...]]
NO_TORCH: Check = ("never", ("torch", "diffusers", "transformers", "carpool.engine"))
NO_CLOCK: Check = ("never", ("time", "datetime", "asyncio", "socket"))
CLAIMS: dict[str, list[Check]] = {  # a module or a package: what its docstring says of imports
    "carpool": [NO_TORCH],
    "carpool.cli.main": [NO_TORCH],
    "carpool.config": [("not directly", ("carpool.engine", "carpool.schedule", "carpool.server"))],
    "carpool.engine": [("only", ("torch",))],
    "carpool.engine.fiber": [
        ("only", ("greenlet",)),
        ("never", ("torch", "carpool.engine.model", "carpool.schedule")),
    ],
    "carpool.engine.fuse": [("never", ("carpool.engine.model", "diffusers", "transformers"))],
    "carpool.engine.observe.co_riders": [("never", ("opentelemetry", "carpool.telemetry"))],
    "carpool.fleet.autoscaler": [NO_TORCH, NO_CLOCK],
    "carpool.fleet.worker_load": [NO_TORCH, NO_CLOCK],
    "carpool.fleet.ray": [("only", ("ray",))],
    "carpool.fleet.router": [NO_TORCH, NO_CLOCK],
    "carpool.fleet.models": [NO_TORCH],
    "carpool.engine.weights.residency": [("never", ("torch", "diffusers"))],
    "carpool.jobs.database": [("only", ("sqlite3",))],
    "carpool.models.pull": [NO_TORCH],
    "carpool.models.published": [NO_TORCH],
    "carpool.models.source": [NO_TORCH],
    "carpool.preflight": [NO_TORCH],
    "carpool.settings.preparation": [NO_TORCH],
    "carpool.settings.quantization": [NO_TORCH],
    "carpool.request.lora": [NO_TORCH],
    "carpool.request.parameters": [NO_TORCH],
    "carpool.schedule": [NO_TORCH, NO_CLOCK],
    "carpool.jobs.store": [("never", ("carpool.worker", "carpool.media", "carpool.server"))],
    "carpool.schedule.peers.compatibility": [NO_CLOCK],
    "carpool.schedule.policy": [NO_TORCH, NO_CLOCK],
    "carpool.server": [NO_TORCH],
    "carpool.telemetry.sglang_metrics": [NO_CLOCK, ("not directly", ("pathlib", "logging"))],
    "carpool.types": [NO_TORCH, ("never", ("pathlib", "os", "socket", "asyncio"))],
    "carpool_lab.load.generator": [("not directly", ("httpx2", "socket"))],
    "carpool_lab.workload": [("not directly", ("time", "datetime", "asyncio", "httpx2"))],
}
CLAIM = re.compile(
    r"\bonly (module|file|folder|place)\b|\b(no|without) torch\b|\bpure (python|functions?)\b"
    r"|\bnothing here (knows|imports|sends)\b|\bknows? (no|nothing)\b|\bno tensors\b",
    re.IGNORECASE,
)

FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def module_of(file: Path) -> str:
    return ".".join(part for part in file.with_suffix("").parts if part != "__init__")


_FILE_OF = {module_of(file): file for file in FILES}
MODULES = set(_FILE_OF)


def file_of(module: str) -> Path:
    return _FILE_OF[module]


def room_of(module: str) -> str:
    lab, *_ = parts = module.split(".")
    return lab if lab == "carpool_lab" else ".".join(parts[:2])


def floor_of(module: str) -> int:
    floors = [number for number, rooms in enumerate(ROOMS) if room_of(module) in rooms]
    assert floors, f"{module} belongs to no room: give it a place in tests/test_imports.py"
    return floors[0]


def statements(tree: ast.AST, *, eager: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import, wherever it stands, but for those that only type checkers read.

    Args:
        eager: only those that run when the module is imported.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # most of all nodes; none holds a statement
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not (eager and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            yield from statements(node, eager=eager)


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse((SOURCE / file).read_text())


@cache
def imports_of(file: Path, *, eager: bool = False) -> set[str]:
    """Modules that a file imports, by their full names."""
    names: set[str] = set()
    for node in statements(parsed(file), eager=eager):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.module is not None, f"{file}: a relative import"
            assert not node.level, f"{file}: a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inside & MODULES) or {node.module}
    return names


def loaded_by(module: str) -> set[str]:
    """All that an import of a module brings, itself included, as far as our files say."""
    todo, found = [module], set[str]()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            parents = name.split(".")
            todo += [".".join(parents[:i]) for i in range(1, len(parents))]
            if name in MODULES:
                todo += imports_of(file_of(name), eager=True)
    return found


def is_within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def covered(module: str) -> list[str]:
    """A module, or a package and all that is in it; `carpool` itself is its `__init__` alone."""
    return [module] if module == "carpool" else [m for m in MODULES if is_within(m, [module])]


def roots(names: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def ours(file: Path) -> set[str]:
    return {name for name in imports_of(file) if name.split(".")[0] in ("carpool", "carpool_lab")}


def test_imports_point_downwards() -> None:
    wrong = {
        str(file): upwards
        for file in FILES
        if (upwards := {one for one in ours(file) if floor_of(one) > floor_of(module_of(file))})
    }

    assert wrong == {}


def test_leaves_know_nouns_only() -> None:
    for file in FILES:
        if (own := room_of(module_of(file))) in LEAVES:
            assert {room_of(name) for name in ours(file)} <= NOUNS | {own}, file


def test_a_library_has_one_door() -> None:
    for file in FILES:
        for library in roots(imports_of(file)) & DOORS.keys():
            assert file.as_posix().startswith(DOORS[library]), f"{file} imports {library}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    # a package's own docstring is no code: who imports `carpool` alone asks for its version
    graph = {module: ours(file) - {module, "carpool"} for module, file in _FILE_OF.items()}

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" <- ".join(circle.args[1]))


def part_of(module: str) -> str:
    """The folder of its package that a module lies in, or itself where it lies in none."""
    depth = 2 if module.startswith("carpool_lab") else 3
    part = ".".join(module.split(".")[:depth])
    return part if (SOURCE / part.replace(".", "/")).is_dir() else module


def arrows_between_parts() -> set[tuple[str, str]]:
    """Imports between the folders and files of one package, as (importer, imported)."""
    pairs = ((module_of(file), name) for file in FILES for name in ours(file))
    return {
        (one, other)
        for one, other in pairs
        if room_of(one) == room_of(other)
        and part_of(one) != part_of(other)
        and other != room_of(other)
    }


def test_folders_of_a_package_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for one, other in arrows_between_parts():
        graph.setdefault(part_of(one), set()).add(part_of(other))

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        arrows = [
            f"{one} imports {other}"
            for one, other in sorted(arrows_between_parts())
            if {part_of(one), part_of(other)} <= {*circle.args[1]}
        ]
        pytest.fail("\n".join([" <- ".join(circle.args[1]), *arrows]))


def test_the_server_imports_no_dialect_by_its_name() -> None:
    core = [file for file in FILES if file.is_relative_to("carpool/server")]
    for file in core:
        dialects = {name for name in imports_of(file) if is_within(name, ["carpool.server.compat"])}
        if module_of(file) == "carpool.server.app":
            assert dialects == {"carpool.server.compat.dialects"}
        elif not is_within(module_of(file), ["carpool.server.compat"]):
            assert not dialects, file


@pytest.mark.parametrize("module", sorted(CLAIMS))
def test_what_a_docstring_claims_about_imports_is_true(module: str) -> None:
    for kind, names in CLAIMS[module]:
        within = covered(module)
        assert within, f"{module} is gone: take it out of CLAIMS"
        if kind == "only":
            house = module.split(".")[0]
            others = [file for file in FILES if module_of(file) not in within]
            found = (f for f in others if f.parts[0] == house and names[0] in roots(imports_of(f)))
            bad = {str(file) for file in found}
        elif kind == "never":
            bad = {name for one in within for name in loaded_by(one) if is_within(name, names)}
        else:
            imported = (name for one in within for name in imports_of(file_of(one)))
            bad = {name for name in imported if is_within(name, names)}
        assert not bad, f"{module}: {kind} {', '.join(names)}"


def test_a_claim_about_imports_is_in_the_table() -> None:
    for file in FILES:
        text = " ".join((ast.get_docstring(parsed(file)) or "").split())
        claim = CLAIM.search(text)
        assert not claim or module_of(file) in CLAIMS, (
            f"{file} says {claim[0]!r}: say in CLAIMS how that is checked, or leave it out"
        )


# Names


def test_a_class_or_a_type_has_its_name_for_itself() -> None:
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in parsed(file).body:
            names = [one.id for one in getattr(node, "targets", []) if isinstance(one, ast.Name)]
            if isinstance(node, ast.ClassDef):
                names = [node.name]
            for name in names:
                if re.fullmatch("[A-Z][a-z]\\w*", name):
                    places.setdefault(name, []).append(str(file))

    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_checked_request_is_not_called_a_job() -> None:
    wrong = []
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target).rpartition(".")[2]
            else:
                continue
            kind = "" if node.annotation is None else ast.unparse(node.annotation)
            if name.strip("_") in ("job", "jobs") and "CheckedRequest" in kind:
                wrong.append(f"{file}:{node.lineno}")

    assert wrong == [], "a job is the durable record; what an engine runs is a request"


# Outside of src/


ROOT = SOURCE.parent
OUTSIDE = sorted(
    path.relative_to(ROOT)
    for folder in ("tests", "proof", "benchmarks", "examples", "training", "docs")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("folder", sorted({file.parts[0] for file in OUTSIDE}))
def test_what_is_shared_by_tests_lies_in_support(folder: str) -> None:
    for file in (file for file in OUTSIDE if file.parts[0] == folder):
        names = {
            name
            for node in statements(ast.parse((ROOT / file).read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            )
        }
        tests = {n for n in names if any(part.startswith("test_") for part in n.split("."))}
        assert not tests, f"{file} imports a test file: what both need belongs to tests/support"
        if folder in ("proof", "benchmarks", "examples", "training"):
            assert "support" not in roots(names), f"{file} imports from tests/"


def test_packages_import_nothing_heavy() -> None:
    for file in FILES:
        if file.name == "__init__.py":
            assert not roots(imports_of(file)) & DOORS.keys(), file


def test_the_front_and_the_command_line_load_neither_torch_nor_ray() -> None:
    code = (
        "import carpool.cli.main, carpool.server.run, carpool.worker.process, sys; "
        "heavy = {'torch', 'diffusers', 'transformers', 'carpool.engine', 'ray'}; "
        "print(sorted(heavy & {*sys.modules}))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.timeout(240)  # every module, in a process of its own
def test_everything_is_imported_without_the_packages_that_are_extras() -> None:
    code = """
import importlib, pkgutil, sys
extras = "av", "bitsandbytes", "gguf", "opentelemetry.sdk", "optimum", "ray", "torchao"
sys.modules |= dict.fromkeys(extras)
import carpool, carpool_lab
for package in carpool, carpool_lab:
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", ".plot")):
            importlib.import_module(module.name)
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert not done.returncode, done.stderr


def test_the_checks_see_what_they_are_to_see() -> None:
    loop = Path("carpool/engine/loop.py")
    assert "carpool.types" in imports_of(loop)
    assert "carpool.engine.model.loaded" in imports_of(loop)
    assert "greenlet" in imports_of(Path("carpool/engine/fiber.py"))
    assert "carpool.engine.loop" in imports_of(Path("carpool/worker/message_handler.py"))
    with pytest.raises(AssertionError, match=r"carpool\.new\.thing belongs to no room"):
        floor_of("carpool.new.thing")


def test_tests_lie_in_folders_of_the_same_names_as_what_they_test() -> None:
    """Beside them are tests of no single folder, of pages, and of what is not in the wheel."""
    others = {
        *("benchmarks", "clients", "lab", "matrix", "outsiders", "support", "training"),
        "engine/device",
    }
    tests = Path(__file__).parent
    folders = {file.parent.relative_to(tests).as_posix() for file in tests.rglob("test_*.py")}

    ours = {folder for folder in folders if not {folder, folder.split("/")[0]} & others} - {"."}
    assert {folder for folder in ours if not (SOURCE / "carpool" / folder).is_dir()} == set()
