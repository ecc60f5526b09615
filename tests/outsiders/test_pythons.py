"""Other Pythons than 3.11, and builds of torch for devices that this machine lacks."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import gather_size_by_comm

from carpool.engine.group import context_parallel

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "docs", "examples", "proof", "training", "clients")
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}
by_their_code = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="comprehensions are in the code of their functions"
)


def lost_names(code: CodeType, outer: frozenset[str] = frozenset()) -> Iterator[str]:
    """Variables of comprehensions that inner functions have from the function around both.

    Python 3.12 and 3.13 make the variable one of the comprehension's function, in which an inner
    function finds no value then: `def f(x): return lambda: ([x for x in ()], lambda: x)` gives one
    that fails.

    Args:
        outer: what the function with this comprehension takes from outside.
    """
    if code.co_name not in COMPREHENSIONS:
        outer = frozenset(code.co_freevars)
    for name in sorted(outer & {*code.co_varnames, *code.co_cellvars}):
        yield f"{name}, line {code.co_firstlineno}"
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from lost_names(inner, outer)


@by_their_code
def test_no_comprehension_takes_a_name_from_an_inner_function() -> None:
    lost = {
        str(file): names
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if (names := [*lost_names(compile(file.read_bytes(), str(file), "exec"))])
    }

    assert lost == {}


@by_their_code
@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("{name: 1 for name in []}", 1), ("[name for name in []]", 1), ("{name for name in []}", 1),
        ("[[name for name in []] for _ in []]", 1), ("[(lambda: name) for name in []]", 1),
        ("tuple([name for name in []] for _ in [])", 0), ("tuple(name for name in [])", 0),
        ("[other for other in [name]]", 0),
    ],
)  # fmt: skip
def test_the_check_of_names_knows_what_later_pythons_fail_at(statement: str, names: int) -> None:
    source = f"""
def outer(name):
    def method():
        {statement}
        return lambda: name
"""
    assert len([*lost_names(compile(source, "a file", "exec"))]) == names


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_a_group_of_cpus_needs_no_driver_for_the_device_that_torch_was_built_for(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks tell one another how long their parts of the sequence are."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_: torch.device(device)
    )  # as such a build answers, with a driver or without
    with context_parallel.listen() as listener:
        port = listener.getsockname()[1]
        context_parallel.join(0, 1, torch.device("cpu"), port, listener)
    try:
        assert dist.group.WORLD is not None
        assert gather_size_by_comm(7, dist.group.WORLD) == [7]
    finally:
        context_parallel.leave()


@pytest.mark.parametrize("category", [SyntaxWarning, DeprecationWarning])
def test_only_our_own_sources_must_compile_without_a_warning(category: type[Warning]) -> None:
    """The first to import a library compiles it, wherever `pip` or `uv` has not."""
    for folder in (".venv/lib/python3.12/site-packages", "build/torchvision/torchvision"):
        warn(category, ROOT / folder / "library.py")
    if category is SyntaxWarning:
        with pytest.raises(SyntaxWarning):
            warn(category, ROOT / "src" / "carpool" / "types.py")


def warn(category: type[Warning], file: Path) -> None:
    """Warn as the compiler does: the module is the file's name without its ending."""
    warnings.warn_explicit("invalid escape sequence", category, str(file), 1, registry={})
