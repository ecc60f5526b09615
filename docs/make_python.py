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
        line = next(text for text in source if text.strip().startswith(f"{field.name}:"))
        kind = line.split(":", 1)[1].split("#")[0].split(" = ")[0].strip()
        meaning = line.split("#", 1)[1].strip() if "#" in line else ""
        yield f"| `{field.name}` | `{_cell(kind)}` | {_cell(meaning)} |"
    yield ""


def _signature(name: str, function: Any) -> list[str]:
    """The signature as in the source."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    parameters = _arguments(node.args)
    answer = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{name}({', '.join(parameters)}){answer}"
    if len(signature) > 88:
        signature = f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){answer}"
    return ["```text", signature, "```", ""]


def _arguments(arguments: ast.arguments) -> list[str]:
    plain = [arg for arg in arguments.args if arg.arg != "self"]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    texts = [_argument(arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if arguments.kwonlyargs and not arguments.vararg:
        texts.append("*")
    texts += [
        _argument(arg, default)
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [*texts, f"**{ast.unparse(arguments.kwarg)}"] if arguments.kwarg else texts


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(arg).replace("'", "")  # types may be strings
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _prose(documented: Any) -> list[str]:
    """A docstring as Markdown: paragraphs unchanged, `Args:` and similar sections as lists."""
    lines: list[str] = []
    inside = False
    for line in (inspect.getdoc(documented) or "").splitlines():
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
