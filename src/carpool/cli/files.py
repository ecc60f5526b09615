"""File formats and file names of `carpool generate`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
ENDINGS: dict[str, tuple[str, ...]] = {
    "pictures": tuple(FORMATS),
    "videos": (".mp4",),
    "meshes": (".glb", ".obj", ".ply"),
    "sound": (".wav", ".flac", ".mp3"),
}
"""File extensions by kind of output, the default first."""


def path_of(output: Path, i: int, count: int, seed: int, prompt: str, used: set[Path]) -> Path:
    """The file of one of several outputs: from the pattern in the name, or numbered from 1.

    Args:
        i: its index, from 0.
        used: files of earlier outputs, which are not reused; the result is added.
    """
    words = re.sub(r"\W+", "-", prompt).strip("-")[:60] or "picture"
    fields = {"{i}": str(i + 1), "{seed}": str(seed), "{prompt}": words}
    name = re.sub(r"\{(i|seed|prompt)\}", lambda match: fields[match[0]], output.name)
    is_told_apart = "{i}" in output.name or ("{seed}" in output.name and "{prompt}" in output.name)
    path = output.with_name(name)
    if (count > 1 and not is_told_apart) or path in used:
        path = path.with_stem(f"{path.stem}-{i + 1}")
    used.add(path)
    return path


@contextmanager
def reported(path: Path, seed: int | None, seconds: float | None) -> Iterator[None]:
    """Report a written file, with its seed and time, on standard error."""
    replaced = "; it replaces a file of that name" if path.exists() else ""
    yield
    duration = "" if seconds is None else f", {seconds:.1f} s"
    click.echo(f"{path}: seed {seed}{duration}{replaced}", err=True)


def check_output(output: Path) -> None:
    """Refuse an unwritable file before any work; the error names valid ones."""
    known = tuple(ending for endings in ENDINGS.values() for ending in endings)
    if output.suffix.lower() not in known:
        rule = f"the name must end in one of {', '.join(known)}"
        raise click.UsageError(f"--output {output}: {rule}")
    if output.is_dir():
        raise click.UsageError(f"--output {output}: it is a folder, name a file")
    if not output.parent.is_dir():
        raise click.UsageError(f"--output {output}: there is no folder {output.parent}")


def output_for(makes: str, output: Path | None, fps: float | None = None) -> Path:
    """The file to write: the requested one, if its format fits the model's output."""
    if fps is not None and makes != "videos":
        raise click.UsageError(f"--fps: the model makes {makes}, leave it out")
    endings = ENDINGS[makes]
    if output is None:
        return Path(f"out{endings[0]}")
    if output.suffix.lower() not in endings:
        rule = f"use {', '.join(endings)}"
        raise click.UsageError(f"--output {output}: the model makes {makes}: {rule}")
    return output
