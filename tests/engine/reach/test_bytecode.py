"""Bytecode of every form is read: that of Python's own library, and what its actions say."""

import asyncio
import dis
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from carpool.engine.reach.bytecode import UnreadableCode, read

FILES = ["ast", "dataclasses", "contextlib", "enum", "typing", "inspect", "tarfile", "functools"]
LIBRARY = Path(inspect.getfile(dis)).parent


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@pytest.mark.parametrize("name", FILES)
def test_pythons_own_library_is_read(name: str) -> None:
    source = (LIBRARY / f"{name}.py").read_text()

    for code in codes(compile(source, name, "exec")):
        read(code)


def test_code_of_coroutines_is_read() -> None:
    for file in Path(inspect.getfile(asyncio)).parent.glob("*.py"):
        for code in codes(compile(file.read_text(), file.name, "exec")):
            read(code)


G: Any = {}


def by_keyword(x: Any) -> Any:
    return G.method(x, 1, out=G["a"], other=x)


def by_global(x: Any) -> Any:
    return by_keyword(x=G)


def in_a_loop(x: Any) -> Any:
    for part in G:
        x = part
    return x


def in_both_branches(x: Any, flag: bool) -> Any:
    y = G if flag else x
    y.a = 1
    return y


def after_an_error(x: Any) -> Any:
    y = G
    try:
        y = x
        x()
    except ValueError:
        y.a = 1
    return y


def overwritten(x: Any) -> Any:
    y = G
    y = x
    y.a = 1
    return y


def spread(*args: Any, **kwargs: Any) -> Any:
    return G(*args, **kwargs)


GLOBAL, X = ("global", "G"), ("param", "x")


def actions(function: Callable[..., Any], kind: str) -> list[Any]:
    return [action for action in read(function.__code__).actions if action.kind == kind]


def test_calls_have_their_functions_and_arguments() -> None:
    [call] = actions(by_keyword, "call")
    [simple] = actions(by_global, "call")
    [handed_on] = actions(spread, "call")

    assert call.target == {("attr", GLOBAL, "method")}
    assert call.args[0] == {X}
    assert dict(call.kwargs) == {"out": {("item", GLOBAL)}, "other": {X}}
    assert simple.target == {("global", "by_keyword")}
    assert dict(simple.kwargs) == {"x": {GLOBAL}}
    assert handed_on.target == {GLOBAL}
    assert handed_on.spread[0] == {("param", "args")}


def test_variables_hold_what_each_way_to_an_instruction_leaves_in_them() -> None:
    assert read(in_a_loop.__code__).returns == {("item", GLOBAL), X}
    assert actions(in_both_branches, "write")[0].target == {GLOBAL, X}
    assert actions(after_an_error, "write")[0].target == {GLOBAL, X}
    assert actions(overwritten, "write")[0].target == {X}


def test_instructions_of_another_python_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(x: Any) -> Any:
        return x

    instructions = list(dis.get_instructions(later.__code__))
    instructions[-1] = instructions[-1]._replace(opname="LOAD_NOTHING_KNOWN")
    monkeypatch.setattr(dis, "get_instructions", lambda code: instructions)

    with pytest.raises(UnreadableCode, match="LOAD_NOTHING_KNOWN"):
        read(later.__code__)
