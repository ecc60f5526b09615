"""Print each file with the first sentence of its docstring, by folder.

usage: make files
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/carpool", "src/carpool_lab", "training")


def lines() -> Iterator[str]:
    """The list, as Markdown."""
    for top in FOLDERS:
        for folder in [ROOT / top, *sorted(p for p in (ROOT / top).rglob("*") if p.is_dir())]:
            files = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
            package = folder / "__init__.py"
            if not files or not package.exists():
                continue
            yield from ("", f"**{folder.relative_to(ROOT)}/** {first_sentence(package)}", "")
            for file in files:
                yield f"- `{file.name}`: {first_sentence(file)}"


def first_sentence(file: Path) -> str:
    """The first sentence of a module's docstring, on one line.

    Raises:
        ValueError: the module has no docstring.
    """
    text = ast.get_docstring(ast.parse(file.read_text()))
    if not text:
        raise ValueError(f"{file} has no docstring: its first sentence says what the file is")
    return re.split(r"(?<=[.!?])\s", " ".join(text.split("\n\n")[0].split()))[0]


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
