"""The command `carpool check`: prove on this machine that fused forwards are correct."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.generate import pairs, sides
from carpool.cli.options import (
    help_without,
    measures_one_process,
    parameter_option,
    settings_from,
    settings_options,
)
from carpool.config import EngineSettings
from carpool_lab.check.requests import QUICK, CheckOptions, described, mixed

if TYPE_CHECKING:
    from carpool_lab.check.report import CheckReport

_SETTINGS = (
    "device", "dtype", "revision", "threads", "min_gain", "cost_table", "max_decode_gib",
    "max_pixels", "infer_specs",
)  # fmt: skip


@click.command(cls=help_without(*_SETTINGS[3:]))
@click.argument("model", default="shapes")
@click.option("--quick", is_flag=True, help="fewer and shorter requests: seconds for small models")
@click.option("--size", help="WIDTHxHEIGHT in pixels  [default: the model's]")
@click.option("--frames", type=click.IntRange(1), help="frames of a video  [default: the model's]")
@click.option("--steps", type=click.IntRange(1), help="denoising steps of the longest request")
@click.option(
    "--max-rows",
    type=click.IntRange(1),
    help="widest forward to time, without a time limit  [default: 8, as time permits]",
)
@click.option(
    "--image",
    type=click.Path(path_type=Path),
    help="input picture of all requests, for models that need one",
)
@parameter_option
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="write all results as JSON, also for `carpool simulate --table`",
)
@settings_options(EngineSettings, only=_SETTINGS)
@measures_one_process
def check(
    model: str,
    quick: bool,
    size: str | None,
    frames: int | None,
    steps: int | None,
    max_rows: int | None,
    image: Path | None,
    parameter: tuple[str, ...],
    file: Path | None,
    **flags: Any,
) -> None:
    """Prove on this machine that requests of MODEL get the same answers together and alone.

    Mixed requests run alone and together, in both numerics modes. The report shows fused calls,
    differences, seconds and memory by component, and recommends settings. `carpool serve` reuses
    the proofs. Exit status 1: a difference exceeds docs/numerics.md.
    """
    if file is not None and not file.parent.is_dir():
        raise click.UsageError(f"--json {file}: there is no folder {file.parent}")
    parameters = dict(pairs(parameter)) | sides(size)
    if frames is not None:
        parameters["num_frames"] = frames
    if image is not None:
        from carpool.media import read_picture

        parameters["image"] = read_picture(image)
    options = replace(QUICK if quick else CheckOptions(), parameters=parameters)
    options = replace(options, steps=steps or options.steps)
    if max_rows is not None:
        options = replace(options, max_rows=max_rows, budget_s=inf)
    settings = settings_from(flags).engine()
    from carpool import preflight  # slow import, not needed for `--help`

    preflight.check(model, settings)  # before torch's slow import
    from tqdm import tqdm

    with tqdm(unit="run", disable=not sys.stderr.isatty()) as bar:
        report = checked(model, settings, options, bar)
    if file is not None:
        text = json.dumps(report.as_json(), indent=1, allow_nan=False)
        file.write_text(text + "\n", encoding="utf-8")
    click.echo(report.as_text())
    if report.problems:
        sys.exit(1)


def checked(model: str, settings: EngineSettings, options: CheckOptions, bar: Any) -> "CheckReport":
    """Load a model and check it.

    Args:
        bar: tqdm bar for the progress.

    Raises:
        CarpoolError: the model cannot be loaded, or a request failed.
    """
    from carpool.engine.cost_store import StoredCosts
    from carpool.engine.model.libraries import log_as_others
    from carpool.engine.model.load import load
    from carpool_lab.check.report import CheckReport
    from carpool_lab.check.run import limit, plain, prove
    from carpool_lab.check.timing import timed

    log_as_others(bars=False)
    loaded = load(model, settings)
    try:
        requests = mixed(loaded.card, options)
        tick: Callable[[], object] = bar.update
        table = StoredCosts(loaded, settings)
        bar.total = _runs(len(requests))
        proofs = prove(loaded, settings, requests, table=table, tick=tick)
        timing, notes = timed(loaded, settings, requests[0], options, proofs["fast"], table, tick)
        alone = plain(loaded, requests, proofs["fast"].alone, tick)
        allowed = limit(loaded.card, loaded, requests)
    finally:
        loaded.undo()
    words = tuple(map(described, requests))
    return CheckReport(words, allowed, proofs, alone, timing, tuple(notes))


def _runs(requests: int) -> int:
    """The minimum of runs: alone and together in both numerics modes, timed, plain."""
    return requests * (2 * (1 + 2) + 1) + 12
