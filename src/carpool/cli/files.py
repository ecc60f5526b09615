"""File formats and file names of `carpool generate`."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import click

FORMATS: dict[str, Literal["png", "jpeg", "webp"]] = {
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".webp": "webp",
}

ENDINGS: dict[str, tuple[str, ...]] = {
    "pictures": tuple(FORMATS),
    "videos": (".mp4",),
    "meshes": (".glb", ".obj", ".ply"),
    "sound": (".wav", ".flac", ".mp3"),
}
"""File extensions by kind of output, the default first."""


def path_of(
    output: Path, i: int, count: int, seed: int, prompt: str, used_paths: Collection[Path] = ()
) -> Path:
    """The file of one of several outputs: from the pattern in the name, or numbered from 1.

    Args:
        i: its index, from 0.
        used_paths: files of earlier outputs, which are not reused.
    """
    words = re.sub(r"\W+", "-", prompt).strip("-")[:60] or "picture"
    fields = {"{i}": str(i + 1), "{seed}": str(seed), "{prompt}": words}
    name = re.sub(r"\{(i|seed|prompt)\}", lambda match: fields[match[0]], output.name)
    is_told_apart = "{i}" in output.name or ("{seed}" in output.name and "{prompt}" in output.name)
    path = output.with_name(name)
    is_own = (count == 1 or is_told_apart) and path not in used_paths
    return path if is_own else path.with_stem(f"{path.stem}-{i + 1}")


def write(path: Path, content: bytes, seed: int | None, seconds: float | None) -> None:
    """Write a file; report seed, time and replacement of an old file on standard error."""
    duration = "" if seconds is None else f", {seconds:.1f} s"
    replaced = "; it replaces a file of that name" if path.exists() else ""
    path.write_bytes(content)
    click.echo(f"{path}: seed {seed}{duration}{replaced}", err=True)


def check_output(output: Path) -> None:
    """Refuse an unwritable file before any work.

    Raises:
        click.UsageError: names the valid ones.
    """
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
