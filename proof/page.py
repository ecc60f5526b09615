"""The sections of `docs/reliability.md` that runs write, each between two markers."""

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"


def machine() -> str:
    """The machine of the measurements."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table: text in the first column, numbers in the rest."""
    marks = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, marks, *rows))


def with_section(page: str, name: str, text: str) -> str:
    """Replace the text between `<!-- name -->` and `<!-- /name -->` in a page.

    Raises:
        ValueError: the page has no such section.
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


def parser_of(doc: str) -> argparse.ArgumentParser:
    """The parser of a proof with `--write`; callers add further options."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="write to docs/reliability.md if all promises hold"
    )
    return parser


def conclude(text: str, problems: Sequence[str], section: str | None) -> int:
    """Print a section and its problems, write it if there are none; returns the exit status."""
    print(text)
    for problem in problems:
        print(problem, file=sys.stderr)
    if section is not None and not problems:
        write_section(section, text)
    return 1 if problems else 0
