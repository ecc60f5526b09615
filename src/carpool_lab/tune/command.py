"""The command `carpool tune`: measure ahead of time how long forwards take."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from carpool.cli.options import measures_one_process, settings_options
from carpool.config import EngineSettings, ServeSettings
from carpool.errors import LibraryMissing
from carpool.schedule.views import CallKind
from carpool_lab.tune.results import ComponentResult, TuneReport

_SETTINGS = (
    "device", "dtype", "revision", "threads", "min_gain", "cost_table", "max_decode_gib",
    "max_pixels",
)  # fmt: skip


@click.command()
@click.argument("model", default="shapes")
@click.option("--sizes", help="WIDTHxHEIGHT,... in pixels  [default: the model's]")
@click.option(
    "--max-rows", type=click.IntRange(1), default=16, show_default=True, help="widest forward"
)
@click.option(
    "--repeats",
    type=click.IntRange(3),
    default=5,
    show_default=True,
    help="runs of each width, beside one to warm up; what is kept are medians",
)
@click.option(
    "--steps", type=click.IntRange(1), help="denoising steps of each request  [default: 4]"
)
@click.option("--guidance", type=float, help="guidance scale  [default: the model's]")
@click.option("--frames", type=click.IntRange(1), help="of a video  [default: the model's]")
@click.option(
    "-o",
    "--output",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    show_default=True,
    help="folder for NAME-tune.png, NAME-tune.json and NAME-batching.json",
)
@click.option("--json", "as_json", is_flag=True, help="print NAME-tune.json in place of the text")
@settings_options(EngineSettings, only=_SETTINGS)
@measures_one_process
def tune(
    model: str,
    sizes: str | None,
    max_rows: int,
    repeats: int,
    steps: int | None,
    guidance: float | None,
    frames: int | None,
    output: Path,
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure what forwards of MODEL take by their rows, and where one more row no longer pays.

    What is learned goes where `carpool serve` will find it, and into three files: a picture,
    everything as JSON (`carpool simulate --table FILE`), and a batching config.
    """
    resolutions = [_resolution(size) for size in sizes.split(",")] if sizes else []
    said = {name: value for name, value in flags.items() if value not in (None, ())}
    settings = ServeSettings.from_environment(os.environ, **said).engine()
    from carpool import preflight  # not for `--help`

    preflight.check(model, settings)  # before torch is imported, which takes seconds
    from tqdm import tqdm

    from carpool.engine.cost_store import StoredCosts
    from carpool.engine.model.load import load, log_as_others
    from carpool_lab.tune.measure import TuneSettings
    from carpool_lab.tune.measure import tune as measure

    parameters = {"guidance_scale": guidance, "num_frames": frames}
    wanted = TuneSettings(
        resolutions,
        max_rows=max_rows,
        repeats=repeats,
        steps=steps,
        parameters={name: value for name, value in parameters.items() if value is not None},
    )
    log_as_others(bars=sys.stderr.isatty())
    loaded = load(model, settings)
    table = StoredCosts(loaded, settings)
    with tqdm(unit="run", disable=not sys.stderr.isatty()) as bar:
        tuned = measure(loaded, settings, wanted, table=table, tick=bar.update)
    everything = json.dumps(tuned.as_json(), indent=1, allow_nan=False)
    files = {
        name: output / f"{tuned.name}-{name}" for name in ("tune.png", "tune.json", "batching.json")
    }
    files["tune.json"].write_text(everything + "\n", encoding="utf-8")
    config = json.dumps(tuned.batching_config(), indent=1, allow_nan=False)
    files["batching.json"].write_text(config + "\n", encoding="utf-8")
    try:
        from carpool_lab.tune.plot import draw_curves

        draw_curves(tuned, files["tune.png"])
    except LibraryMissing as error:  # what was measured may have taken an hour
        click.echo(f"carpool: {error}", err=True)
        del files["tune.png"]
    click.echo(everything if as_json else _text(tuned))
    for name, path in files.items():
        click.echo(f"{_USES[name]}: {path}", err=as_json)
    click.echo(f"learned, read at the start of `carpool serve`: {table.path}", err=as_json)


_USES = {
    "tune.png": "\npicture",
    "tune.json": "everything, for `carpool simulate --table`",
    "batching.json": "rules, for `--batching-mode dynamic --batching-max-size N --batching-config`",
}


def _text(tuned: TuneReport) -> str:
    """The results as text, a table for each size."""
    blocks = [
        f"{tuned.model} on {tuned.device}, {tuned.dtype}; medians, min_gain {tuned.min_gain:g}\n"
        f"speed factor {tuned.speed_factor:.3g}: seconds now, as a multiple of those in the table "
        "before (1 without one); every width was tried"
    ]
    shown: dict[CallKind, str] = {}  # sizes share text encoders
    for size in tuned.sizes:
        most = size.most(tuned.min_gain)
        new = [one for one in size.components if one.kind not in shown]
        pays = f"best with up to {most} request{'s' * (most > 1)} a step" if size.components else ""
        head = [f"{size.name}: {'; '.join(filter(None, (pays, size.problem)))}"]
        if new:
            head += [
                "",
                "| component | rows | ms | sd (ms) | runs | rows/s | gain | peak MiB | |",
                "|---" * 9 + "|",
            ]
        blocks.append("\n".join([*head, *_lines(new, tuned.min_gain)]))
        known = [
            f"{one.kind}: as for {shown[one.kind]}" for one in size.components if one not in new
        ]
        if known:
            blocks.append("\n".join(known))
        shown |= {one.kind: size.name for one in new}
    return "\n\n".join(blocks)


def _lines(components: Sequence[ComponentResult], min_gain: float) -> Iterator[str]:
    for one in components:
        gains, bend = one.gains, one.knee(min_gain)
        for rows, seconds in one.seconds.items():
            gain = f"{gains[rows]:+.0%}" if rows in gains else ""
            peak = f"{one.peak_bytes[rows] / 2**20:.0f}" if rows in one.peak_bytes else "-"
            mark = "knee" if rows == bend else ""
            sd = f"{one.sd[rows] * 1000:.2g}" if rows in one.sd else "-"
            yield (
                f"| {one.kind} | {rows} | {seconds * 1000:.3g} | {sd} | {one.tries.get(rows, '-')} "
                f"| {rows / seconds:.4g} | {gain} | {peak} | {mark} |"
            )
        if one.too_wide:
            yield f"| {one.kind} | {one.too_wide} | - | - | - | - | - | - | did not fit |"


def _resolution(size: str) -> tuple[int, int]:
    if not (sides := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size.strip())):
        raise click.UsageError(f"--sizes {size!r}: write WIDTHxHEIGHT,..., such as 512x512,768x512")
    return int(sides[1]), int(sides[2])
