"""Everything that a machine with an accelerator can tell, on one page: good or bad.

usage: make gpu-page      (or: python -m benchmarks.gpu_everything --output PAGE.md)

Runs the commands below, one after the other. A page is written after each, so that what hangs or
fails leaves what was found before; a command that fails stands there with what it said. With
`--device cpu` the same commands run with tiny models: a dry run, whose figures mean nothing.
"""

import argparse
import datetime
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LAST_LINES = 40  # of a command that fails
_HEADING = re.compile(r"^(#+ )", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """A command, and what it is to show."""

    title: str
    command: Sequence[str]  # after `python`
    limit_s: float
    writes_page: bool = False  # into the file that `--output` names; else what it prints is it


@dataclass(frozen=True)
class Ran:
    """What became of it."""

    part: Part
    status: int | None  # None: it took too long
    output: str
    seconds: float


def parts(device: str, model: str) -> list[Part]:
    """All that is run on a device; on a CPU with tiny models."""
    tiny = ("--tiny",) if device == "cpu" else ()
    check = ("-c", "from carpool.cli.main import main; main()", "check", model, "--device", device)
    return [
        Part("Answers: fused against alone, and against diffusers", check, 1800),
        Part("Models of real size", ("-m", "benchmarks.gpu", *tiny), 1200, writes_page=True),
        Part(
            "Streamed weights",
            ("-m", "benchmarks.stream_device", "--device", device, *tiny),
            1200,
        ),
    ]


def run(part: Part) -> Ran:
    """Run a part. What it says beside its figures is kept only where it fails."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "page.md"
        command = [*part.command, *(("--output", str(written)) if part.writes_page else ())]
        try:
            done = subprocess.run(
                [sys.executable, *command], capture_output=True, timeout=part.limit_s, check=False
            )
            status, figures, beside = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            status, figures, beside = None, late.stdout or b"", late.stderr or b""
        output = figures.decode(errors="replace")
        if status != 0:
            output += beside.decode(errors="replace")
        if written.is_file():
            own = _HEADING.sub(r"##\1", written.read_text(encoding="utf-8"))
            output = own if status == 0 else f"{output}\n{own}"
    return Ran(part, status, output, time.monotonic() - began_s)


def machine() -> Iterator[str]:
    """What it was measured on."""
    import torch

    known = torch.accelerator.current_accelerator()
    name = getattr(torch.get_device_module(known), "get_device_name", None) if known else None
    yield f"- {name() if name else known or 'a CPU'}; torch {torch.__version__}"
    yield f"- {platform.platform()}, Python {platform.python_version()}"


def page(about: Sequence[str], ran: Sequence[Ran]) -> str:
    """The page, in Markdown."""
    lines = ["# Measured on one machine", "", "Made by `make gpu-page`; do not edit.", "", *about]
    for one in ran:
        said = "python " + " ".join(one.part.command)
        ended = {0: "", None: f"; it was ended after {one.part.limit_s:.0f} s"}
        how = ended.get(one.status, f"; it failed, with status {one.status}")
        lines += ["", f"## {one.part.title}", "", f"`{said}`: {one.seconds:.0f} s{how}.", ""]
        text = one.output.strip().splitlines()
        if one.status == 0 and any(line.startswith(("| ---", "|---")) for line in text):
            lines += text  # tables
        else:
            lines += ["```", *(text if one.status == 0 else text[-LAST_LINES:]), "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="shapes", help="that is checked: a hub id or a folder")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    about = [f"- {datetime.date.today().isoformat()}", *machine()]
    if options.device == "cpu":
        about.append("- a dry run on a CPU, of tiny models: its figures mean nothing")
    ran: list[Ran] = []
    for part in parts(options.device, options.model):
        print(f"{part.title} ...", flush=True)
        ran.append(run(part))
        options.output.write_text(page(about, ran), encoding="utf-8")
    sys.exit(any(one.status != 0 for one in ran))


if __name__ == "__main__":
    main()
