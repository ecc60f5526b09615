"""All measurements on a machine with a GPU, in parts of nine minutes; a partial run is usable.

usage: PYTHONPATH=src python -m benchmarks.gpu_page PART...   [--device cuda] [--tiny]
                                                              [--output build/gpu]

Parts, by importance: check, rows, engine, compiled, streamed, quantized, waits, language; or all.
Each runs in its own process with a time limit: a crash or a hang is a line of the page. Measured
rows are stored at once in OUTPUT/PART.jsonl, and a repeated part measures only the missing rows.
After each part, OUTPUT/page.md is made from all rows.

In addition to torch and transformers it needs benchmarks/gpu_wheels.txt, but no network. `--tiny`
runs everything on a CPU with small models: a dry run with meaningless numbers.
"""

import argparse
import contextlib
import faulthandler
import importlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu_records import Rows, append, outcome, read

PARTS = {
    "check": "Does it run at all, and equal to plain diffusers?",
    "rows": "Seconds of a forward by its rows, and the knee",
    "engine": "Through the engine, beside plain diffusers with a lock",
    "compiled": "The same, compiled",
    "streamed": "Weights that are streamed",
    "quantized": "Quantized weights",
    "waits": "Where the device waits",
    "language": "Language stages",
}
LIMIT_S = 540.0  # time limit of a part: such machines end commands after ten minutes
GRACE = 1 / 9  # the end of the limit, in which no row starts
LAST_LINES = 12  # last lines of a failed part's output


def inside(part: str, options: argparse.Namespace) -> None:
    """Measure one part, in this process."""
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    began_s = time.monotonic()
    module = importlib.import_module(f"benchmarks.gpu_{part}")
    rig = importlib.import_module("benchmarks.gpu_build").rig(options.device, options.tiny)
    rows = Rows(file_of(options, part), began_s + options.limit_s * (1 - GRACE))
    rows.write("machine", "machine", machine(rig))
    module.measure(rig, rows)


def _end_with_parent() -> None:
    """When the parent is gone, end this process and its children: they hold the device."""
    os.read(0, 1)  # ends with the parent
    os.killpg(0, signal.SIGKILL)


def machine(rig: Any) -> dict[str, str]:
    names = ("torch", "diffusers", "transformers", "numpy")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return {
        "device": f"{rig.name}{', TINY MODELS: A DRY RUN' if rig.is_tiny else ''}",
        "versions": f"{versions}, Python {platform.python_version()}",
    }


def run(part: str, options: argparse.Namespace) -> bool:
    """Run one part in its own process; returns whether it succeeded."""
    command = [sys.executable, "-m", "benchmarks.gpu_page", part, "--inside"]
    command += ["--device", options.device, "--output", str(options.output)]
    command += ["--limit-s", str(options.limit_s), *(["--tiny"] if options.tiny else [])]
    log, began_s = options.output / f"{part}.log", time.monotonic()
    with log.open("wb") as stderr:
        pipes: Any = {"stdin": subprocess.PIPE, "stderr": stderr}
        process = subprocess.Popen(command, start_new_session=True, **pipes)
        try:
            how = f"status {status}" if (status := process.wait(options.limit_s)) else ""
        except subprocess.TimeoutExpired:
            how = "ended by its clock"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            process.wait()
    last = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if how else []
    end = {"seconds": round(time.monotonic() - began_s), "how": how, "said": "\n".join(last)}
    append(file_of(options, part), {"row": "end", "state": "end", "cells": end})
    print(f"{part}: {end['seconds']} s{f', {how}' if how else ''}", flush=True)
    return not how


def file_of(options: argparse.Namespace, part: str) -> Path:
    path: Path = options.output / f"{part}.jsonl"
    return path


def page(folder: Path) -> str:
    """The Markdown page of all rows in a folder."""
    lines = ["# Measured on one machine", "", "Made by `python -m benchmarks.gpu_page`; "
             "do not edit. The columns are explained in `benchmarks/gpu_*.py`."]  # fmt: skip
    for part, title in PARTS.items():
        if lines_read := read(folder / f"{part}.jsonl"):
            lines += ["", f"## {title}", "", *_part(lines_read)]
    return "\n".join(lines) + "\n"


def _part(lines_read: Sequence[dict[str, Any]]) -> Iterator[str]:
    last = {line["state"]: line["cells"] for line in lines_read}
    if "machine" in last:
        yield f"{last['machine']['device']}; {last['machine']['versions']}."
    if (end := last.get("end", {})).get("how"):
        yield f"\nThe part did not end by itself: {end['how']}.\n\n```\n{end['said']}\n```"
    rows = outcome([line for line in lines_read if line["state"] not in ("machine", "end")])
    tables: dict[str, list[dict[str, Any]]] = {}
    for line in rows:
        if line["state"] == "measured":
            cells = dict(line["cells"])
            tables.setdefault(cells.pop("table", ""), []).append({"": line["row"], **cells})
    for title, cells_of_table in tables.items():
        yield f"\n{f'### {title}' if title else ''}\n".rstrip() + "\n"
        yield from _table(cells_of_table)
    reasons = {"began": "the process ended in the middle of it", "failed": "", "left out": ""}
    missing = [
        {"": line["row"], "not measured": line["state"] if line["state"] != "began" else "crashed",
         "why": line["cells"].get("why", reasons[line["state"]])}
        for line in rows if line["state"] in reasons
    ]  # fmt: skip
    if missing:
        yield ""
        yield from _table(missing)


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    head = list(dict.fromkeys(name for row in rows for name in row))
    for cells in (head, ["---"] * len(head), *([row.get(n, "") for n in head] for row in rows)):
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", "<br>")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all", "page"], metavar="PART",
                        help=", ".join(PARTS) + "; all; page: only rebuild the page")  # fmt: skip
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="a folder")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of each part")
    parser.add_argument("--tiny", action="store_true", help="small models: a dry run, on a CPU too")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.inside:
        inside(options.parts[0], options)
        return
    parts = PARTS if "all" in options.parts else [part for part in options.parts if part != "page"]
    ended_well = True
    for part in [*parts, None]:
        ended_well &= part is None or run(part, options)
        with contextlib.suppress(OSError):  # a full disk: later parts print their rows
            (options.output / "page.md").write_text(page(options.output), encoding="utf-8")
    sys.exit(not ended_well)


if __name__ == "__main__":
    main()
