"""Shared options of this package's commands, and readers of users' files."""

import json
from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import click

from carpool.errors import InvalidValue
from carpool_lab.workload import Arrival, Mix, of_file, read_trace

Flags = SimpleNamespace
"""The values of a command's parameters, as attributes."""


def file_path(**rules: Any) -> click.Path:
    """The click type of a file option."""
    return click.Path(dir_okay=False, path_type=Path, **rules)


burst_option = click.option(
    "--burst", type=click.IntRange(1), default=1, show_default=True, help="requests that arrive "
    "together; the rate stays the same",
)  # fmt: skip
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="seed of arrivals and requests"
)
trace_option = click.option(
    "--trace",
    type=file_path(exists=True),
    help='arrivals from a file: JSON lines {"at_s": seconds, ...}, other fields as for --mix',
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="print this JSON instead of text"
)
save_option = click.option(
    "--save-result", type=file_path(), help="write all results as JSON, with every request"
)


def refuse(flags: Mapping[str, Any], names: Collection[str], rule: str) -> None:
    """Refuse explicit flags of these names."""
    for name in names:
        if flags[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} {rule}")


def check_folders(*paths: Path | None) -> None:
    """Refuse a file in a missing folder before the work starts."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise click.UsageError(f"{path}: there is no folder {path.parent}")


def parse_loads(text: str) -> list[float]:
    """Parse `--loads`; raises InvalidValue."""
    try:
        loads = [float(load) for load in text.split(",")]
    except ValueError:
        raise InvalidValue(f"--loads {text}: write numbers, such as 0.5,0.9") from None
    if not all(0 < load < inf for load in loads):
        raise InvalidValue(f"--loads {text}: must be above 0")
    return loads


def traced(path: Path, mix: Mix, rng: Random, count: int | None) -> list[Arrival]:
    """Read the first arrivals of a trace; raises InvalidValue."""
    with of_file(path):
        arrivals = read_trace(text_of(path), mix, rng)[:count]
    if not arrivals:
        raise InvalidValue(f"--trace {path}: is empty")
    return arrivals


def text_of(path: Path) -> str:
    """Read a text file; raises InvalidValue."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path}: not UTF-8: {error}") from None


def conclude(result: Any, text: str, options: Flags) -> None:
    """Write a result as JSON to `--save-result`, and print its text, or with `--json` this JSON."""
    as_json = json.dumps(result, indent=1, allow_nan=False)
    if options.save_result is not None:
        options.save_result.write_text(as_json + "\n", encoding="utf-8")
    click.echo(as_json if options.as_json else text)
