"""Sections of pages that runs and benchmarks write, each between two markers."""

import argparse
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from carpool_lab.markdown import table as table

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
BENCHMARKS = PAGE.with_name("benchmarks.md")


def machine() -> str:
    """The machine of the measurements."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


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


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Replace a section of a page; raises ValueError if it has no such section."""
    page.write_text(with_section(page.read_text(), name, text))


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
