"""The sections of `docs/reliability.md` that runs write, each between two markers."""

import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"


def machine() -> str:
    """What it was measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((one.partition(":")[2].strip() for one in lines if "model name" in one), "?")
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    marks = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, marks, *rows))


def with_section(page: str, name: str, text: str) -> str:
    """The page with another text between `<!-- name -->` and `<!-- /name -->`.

    Raises:
        ValueError: it has no such section.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    changed, count = pattern.subn(lambda _: f"{begin}\n\n{text.strip()}\n\n{end}", page)
    if count != 1:
        raise ValueError(f"the page has {count} sections {name!r}, it must have one")
    return changed


def write_section(name: str, text: str) -> None:
    """Replace a section of the page."""
    PAGE.write_text(with_section(PAGE.read_text(), name, text))
