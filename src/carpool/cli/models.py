"""`carpool models`: the proven models, or how the calls of one model fuse."""

import json
from typing import Any

import click

from carpool.cli.options import settings_from, settings_options
from carpool.config import EngineSettings


@click.command()
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@settings_options(EngineSettings)
def models(model: str | None, as_json: bool, **flags: Any) -> None:
    """List the models that are proven, and what fuses of each. Others run too.

    With MODEL, which is loaded: how each of its heavy calls fuses, by what was proven so far.
    """
    from carpool.models.grid import rows, table

    if model is None:
        click.echo(json.dumps(rows(), indent=1) if as_json else "\n".join(table()))
        return
    from carpool.engine.probation.report import lines

    found = lines(model, settings_from(flags).engine())
    text = (f"{one['call']:<36} {one['fuses']:<10} {one['why']}" for one in found)
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(text))
