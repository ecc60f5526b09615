"""`carpool models`: the proven models, or how a model's calls fuse; `carpool pull`: a download."""

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import click

from carpool.cli.jobs import ServerClient
from carpool.cli.options import GenerateHelp, refuse, settings_from, settings_options
from carpool.config import EngineSettings


@click.command(cls=GenerateHelp)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--url", help="list the models and workers of a running server instead")
@click.option("--api-key", envvar="CARPOOL_API_KEY", help="of that server")
@settings_options(EngineSettings)
def models(
    model: str | None, as_json: bool, url: str | None, api_key: str | None, **flags: Any
) -> None:
    """List the proven models, and which calls of each fuse. Other models run too.

    MODEL: load it, and show how each of its heavy calls fuses, as proven so far. --url: show
    the models of a server, and the state of its models and workers.
    """
    from carpool.models.grid import rows, table

    if url is not None or model is None:
        refuse(flags, "is for a MODEL that is loaded: name one, or leave it out")
    if url is not None:
        if model is not None:
            raise click.UsageError("--url lists what a server serves: leave MODEL out")
        with closing(ServerClient(url, api_key)) as client:
            served = client.served()
        click.echo(json.dumps(served, indent=1) if as_json else "\n".join(_lines(served)))
        return
    if model is None:
        click.echo(json.dumps(rows(), indent=1) if as_json else "\n".join(table()))
        return
    settings = settings_from(flags).engine()
    from carpool import preflight  # slow import, not needed for `--help`

    preflight.check(model, settings)  # before torch's slow import
    from carpool.engine.probation.report import lines

    calls = lines(model, settings)
    text = (f"{call['call']:<36} {call['fuses']:<10} {call['why']}" for call in calls)
    click.echo(json.dumps(calls, indent=1) if as_json else "\n".join(text))


def _lines(served: Mapping[str, Any]) -> list[str]:
    lines = []
    for model in served["models"]:
        soon = f", ready in {model['ready_in_s']:.0f} s" if model.get("ready_in_s") else ""
        tasks = ", ".join(model["tasks"]) or "not loaded yet"
        lines.append(f"{model['id']:<24} {model['state']}{soon:<10} {tasks}")
        private = model.get("private", {})
        lines += [f"  {task} rides alone: {why}" for task, why in private.items()]
        lines += [
            f"  worker {worker['worker']:<3} {worker['device']:<12} {worker['state']} "
            f"{worker.get('error', '')}"
            for worker in served["workers"]
            if worker["model"] == model["id"]
        ]
    return [line.rstrip() for line in lines]


@click.command()
@click.argument("model")
@click.option("--revision", help="branch, tag or commit")
@click.option("--variant", help="variant of the weight files, such as fp16")
def pull(model: str, revision: str | None, variant: str | None) -> None:
    """Download MODEL from the hub, so that serving it needs no network.

    MODEL is a hub id like 'org/name', or one file of a repository, 'org/name/file.gguf'. Only
    needed files are downloaded; an interrupted download resumes. The token is from `hf auth login`
    or HF_TOKEN. Prints the folder.
    """
    from carpool.models.pull import pull as fetch

    click.echo(fetch(model, revision, variant))
