"""`carpool serve`: a model over HTTP."""

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from carpool.cli.config_file import read_config
from carpool.cli.options import settings_from, settings_options
from carpool.cli.peer_flags import PeerFlagsCommand, peer_options, translated
from carpool.config import ENV_PREFIX, ServeSettings
from carpool.settings.batching_mode import MODES_OF, with_mode
from carpool.telemetry import standard_streams


@click.command(cls=PeerFlagsCommand)
@click.argument("models", nargs=-1, metavar="[[NAME=]MODEL]...")
@click.option("--model-path", help="MODEL, as a flag")
@click.option(
    "--pipeline",
    metavar="MODULE:FUNCTION",
    help="your function that returns the pipeline to serve, instead of MODEL; the worker calls "
    "it at every start",
)
@click.option(
    "--deploy-config", type=click.Path(path_type=Path), help="YAML of stages with engine_args"
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="YAML file of settings, as max_queue: 100; flags and variables win. `models:` lists "
    "several, with model, name, workers, devices, load (start, on_demand), keep_alive and settings",
)
@settings_options(ServeSettings)
@peer_options
def serve(
    models: tuple[str, ...],
    model_path: str | None,
    pipeline: str | None,
    deploy_config: Path | None,
    config: Path | None,
    **flags: Any,
) -> None:
    """Serve a MODEL, or several, over HTTP, with OpenAI's image API.

    MODEL is 'shapes' (embedded; the default), a hub id like 'org/name', a folder of a
    pipeline or language model, or a .safetensors or .gguf file. Every flag may also be an
    environment variable, such as CARPOOL_MAX_QUEUE, or a line of a file (--config). Flags of SGLang
    and vLLM-Omni work too.
    """
    if model_path and models not in ((), (model_path,)):
        named = " ".join(models)
        raise click.UsageError(f"MODEL is {named!r} and --model-path {model_path!r}: say one")
    if pipeline and (models or model_path):
        raise click.UsageError("--pipeline builds the model: leave MODEL out")
    overrides = flags.pop("stage_overrides")
    standard_streams.protect()
    for reload in (signal.SIGHUP, signal.SIGUSR2):  # nothing to reload yet; the default ends it
        signal.signal(reload, lambda *_: None)
    flags = translated(flags)
    deploy = _deploy(deploy_config, overrides)
    variables = {
        name.removeprefix(ENV_PREFIX).lower(): text
        for name, text in os.environ.items()
        if name.startswith(ENV_PREFIX)
    }
    given_flags = {name: value for name, value in flags.items() if value not in (None, ())}
    of_file = {} if config is None else read_config(config)
    entries = of_file.pop("models", None)
    if entries is not None and (models or model_path or pipeline):
        raise click.UsageError("--config names the models: leave MODEL out")
    of_file.pop("model", None) if pipeline else None
    mode = with_mode(of_file | variables | given_flags).get("batching_mode")
    if mode is not None and mode != deploy.get("batching_mode", mode):
        for name in [name for name in deploy if name in MODES_OF]:
            click.echo(f"carpool: {name} of {deploy_config}: not with mode {mode}", err=True)
            del deploy[name]
        del deploy["batching_mode"]
    below = {name: v for name, v in (deploy | of_file).items() if name not in variables}
    values = below | given_flags
    model_of_file = values.pop("model", None)
    names = models or (model_path or model_of_file or "shapes",)
    settings = settings_from(values)
    if "batching_mode" not in values and settings.batching_mode in MODES_OF.values():
        mode = settings.batching_mode
        cap = "max_num_seqs" if mode == "request" else "batching_max_size"
        alone = f"; {cap} is 1, so nothing is batched" if getattr(settings, cap) == 1 else ""
        click.echo(f"carpool: the settings choose batching mode {mode}{alone}", err=True)
    from carpool.fleet.models import listed_models, models_of, settings_on
    from carpool.preflight import check  # slow import, not needed for `--help`

    if entries is None:
        specs = models_of(names, settings, pipeline)
    else:
        specs = listed_models(entries, settings, str(config))
    for spec in specs:
        for device in dict.fromkeys(spec.devices):
            check(spec.model, settings_on(spec, device), spec.factory)
    gc.disable()  # imports make no garbage: saves an eighth of the time
    try:
        from carpool.server.startup import set_limits
        from carpool.worker.start import ForkingStarter

        starter = ForkingStarter(settings.worker_python)
        set_limits()  # for workers, too
        is_here = settings.ray is None and settings.worker_python is None
        if is_here and not all(spec.is_on_demand for spec in specs):
            starter.start_server()  # imports torch while this process imports the front
        from carpool.server.run import serve as run
    finally:
        gc.enable()
    sys.exit(run(specs, settings, starter))


def _deploy(file: Path | None, overrides: str | None) -> dict[str, Any]:
    """Settings and model of a deploy file, with JSON `overrides` of its stages; fields without
    effect are named on standard error."""
    if file is None and overrides is None:
        return {}
    from carpool.settings.peers.vllm_omni_deploy import load_deploy

    deploy = load_deploy(file, overrides)
    for key in deploy.unused:
        click.echo(f"carpool: {file or '--stage-overrides'}: {key} is ignored", err=True)
    return dict(deploy.settings)
