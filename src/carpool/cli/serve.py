"""`carpool serve`: a model over HTTP."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from carpool.cli.options import settings_from, settings_options
from carpool.config import ENV_PREFIX, ServeSettings
from carpool.errors import CarpoolError


@click.command()
@click.argument("model", required=False)
@click.option("--model-path", help="MODEL, as a flag")
@click.option(
    "--pipeline",
    metavar="MODULE:FUNCTION",
    help="a function of yours that returns the pipeline to serve, instead of MODEL; the worker "
    "calls it, and calls it again when it is restarted",
)
@click.option(
    "--deploy-config", type=click.Path(path_type=Path), help="YAML of stages with engine_args"
)
@settings_options(ServeSettings)
def serve(
    model: str | None,
    model_path: str | None,
    pipeline: str | None,
    deploy_config: Path | None,
    **flags: Any,
) -> None:
    """Serve MODEL over HTTP, with OpenAI's image API.

    MODEL is 'shapes' (embedded; the default), a hub id like 'org/name', or a folder in diffusers
    layout. Every flag can be given as an environment variable, such as CARPOOL_MAX_QUEUE.
    """
    if model and model_path and model != model_path:
        raise click.UsageError(f"MODEL is {model!r} and --model-path {model_path!r}: say one")
    if pipeline and (model or model_path):
        raise click.UsageError("--pipeline builds the model: leave MODEL out")
    deploy = _deploy(deploy_config)
    said = {name for name, value in flags.items() if value not in (None, ())}
    said |= {name.removeprefix(ENV_PREFIX).lower() for name in os.environ}
    flags |= {name: value for name, value in deploy.items() if name not in said}
    chosen = model or model_path or flags.pop("model", None) or "shapes"
    flags.pop("model", None)
    settings = settings_from(flags)
    from carpool.preflight import check  # not for `--help`

    check(chosen, settings.engine(), pipeline)
    from carpool.server.run import serve as run

    sys.exit(run(chosen, settings, pipeline))


def _deploy(file: Path | None) -> dict[str, Any]:
    """What a deploy file sets, its model among it; names on standard error what it has in vain."""
    if file is None:
        return {}
    from carpool.schedule.peers.vllm_omni_deploy import load_deploy

    try:
        deploy = load_deploy(file)
    except CarpoolError as error:
        raise click.UsageError(str(error)) from error
    for key in deploy.unused:
        click.echo(f"carpool: {file}: {key} has no use here, and is passed over", err=True)
    return dict(deploy.settings)
