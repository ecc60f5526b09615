"""Write `docs/python.md` from the docstrings of `carpool`'s exports.

usage: make docs    (a test fails if the page is outdated)
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import carpool

PAGE = Path(__file__).with_name("python.md")
HEAD = """# Python

`make docs` writes this page from docstrings; do not edit it. Examples are in
[Start in five minutes](start.md), [Jobs](jobs.md) and [LoRA](lora.md); keywords of `load` are the
[settings](reference.md#settings) with that mark.
"""


def page() -> str:
    """The whole page: functions first, then classes with their public members."""
    names = sorted(carpool.__all__, key=lambda n: (inspect.isclass(getattr(carpool, n)), n))
    lines = [HEAD]
    for name in names:
        thing = getattr(carpool, name)
        if inspect.isclass(thing):
            lines += [f"## carpool.{name}", "", *_prose(thing), *_fields(thing), *_members(thing)]
        else:
            lines += [f"## carpool.{name}", "", *_signature(name, thing), *_prose(thing)]
    return "\n".join(lines).rstrip() + "\n"


def _members(cls: type) -> Iterator[str]:
    fields = {field.name for field in dataclasses.fields(cls)} if _is_data(cls) else set()
    for name, member in vars(cls).items():
        if name.startswith("_") or name in fields:
            continue
        if isinstance(member, property):
            yield from [f"### {cls.__name__}.{name}", "", *_prose(member)]
        elif inspect.isfunction(member):
            yield from [
                f"### {cls.__name__}.{name}",
                "",
                *_signature(name, member),
                *_prose(member),
            ]


def _fields(cls: type) -> Iterator[str]:
    """Fields of a dataclass, with their trailing comments."""
    if not _is_data(cls):
        return
    source = inspect.getsource(cls).splitlines()
    yield from ["| field | type | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(cls):
        line = next(one for one in source if one.strip().startswith(f"{field.name}:"))
        kind = line.split(":", 1)[1].split("#")[0].split(" = ")[0].strip()
        what = line.split("#", 1)[1].strip() if "#" in line else ""
        yield f"| `{field.name}` | `{_cell(kind)}` | {_cell(what)} |"
    yield ""


def _signature(name: str, function: Any) -> list[str]:
    """The signature as in the source."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    shown = _arguments(node.args)
    answer = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    whole = f"{name}({', '.join(shown)}){answer}"
    if len(whole) > 88:
        whole = f"{name}(\n    " + ",\n    ".join(shown) + f",\n){answer}"
    return ["```text", whole, "```", ""]


def _arguments(said: ast.arguments) -> list[str]:
    plain = [one for one in said.args if one.arg != "self"]
    defaults = [None] * (len(plain) - len(said.defaults)) + list(said.defaults)
    shown = [_argument(one, default) for one, default in zip(plain, defaults, strict=True)]
    if said.kwonlyargs and not said.vararg:
        shown.append("*")
    shown += [
        _argument(one, default)
        for one, default in zip(said.kwonlyargs, said.kw_defaults, strict=True)
    ]
    return [*shown, f"**{ast.unparse(said.kwarg)}"] if said.kwarg else shown


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    shown = ast.unparse(one).replace("'", "")  # types may be strings
    return shown if default is None else f"{shown} = {ast.unparse(default)}"


def _prose(thing: Any) -> list[str]:
    """A docstring as Markdown: paragraphs unchanged, `Args:` and similar sections as lists."""
    lines: list[str] = []
    inside = False
    for line in (inspect.getdoc(thing) or "").splitlines():
        if line in ("Args:", "Raises:", "Returns:", "Yields:"):
            lines += [f"**{line[:-1]}**", ""]
            inside = True
        elif inside and line.startswith("    ") and not line.startswith("     "):
            head, colon, rest = line.strip().partition(": ")
            lines.append(f"- `{head}`: {rest}" if colon else f"- {line.strip()}")
        elif inside and line.startswith("     "):
            lines.append("  " + line.strip())
        else:
            inside = inside and not line
            lines.append(line)
    text = textwrap.dedent("\n".join(lines)).strip()
    return [text, ""] if text else []


def _is_data(cls: type) -> bool:
    return dataclasses.is_dataclass(cls)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
