"""Write `docs/reference.md` from the code: settings, commands, errors, metrics, fusing rules.

usage: make docs    (a test fails if the page is outdated)
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import click

from carpool import errors
from carpool.cli.config_file import schema
from carpool.cli.main import cli
from carpool.config import ENV_PREFIX, JOBS, WORKERS, EngineSettings, ServeSettings
from carpool.engine.model.quantize import READ_METHODS
from carpool.engine.specs import SPECS
from carpool.telemetry.metric_list import METRICS

PAGE = Path(__file__).parent / "reference.md"


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            "# Reference",
            "",
            "Made from the code by `make docs`; do not edit.",
            "",
            "## Settings",
            "",
            "Each is a flag of `carpool serve` and an environment variable; those marked `load` "
            "are also keywords of `carpool.load` and flags of `carpool generate`; those marked "
            "`jobs` keywords of `carpool.load` for `engine.jobs`.",
            "",
            "| flag | variable | default | unit | load | what |",
            "| --- | --- | --- | --- | --- | --- |",
            *_settings(),
            "",
            "## Commands",
            "",
            "`carpool COMMAND --help` says more. Settings are not listed again.",
            "",
            "| command | what | flags |",
            "| --- | --- | --- |",
            *_commands("carpool", cli),
            "",
            "## Errors",
            "",
            "Over HTTP in OpenAI's shape; in Python the classes of `carpool.errors`.",
            "",
            "| status | code | class | meaning | same request later? |",
            "| --- | --- | --- | --- | --- |",
            *_errors(),
            "",
            "## Weights that are quantized already",
            "",
            "By `quant_method` of a component's `config.json`. If a requirement is missing, an "
            "error names it when the model is loaded, with an alternative.",
            "",
            "| method | package | other requirements |",
            "| --- | --- | --- |",
            *(f"| `{m}` | {p or '-'} | {c or '-'} |" for m, (p, c) in READ_METHODS.items()),
            "",
            "## Metrics",
            "",
            "Metrics of `GET /metrics`, which needs an API key if the server has keys. Metrics of "
            "a worker are absent while it restarts; then they count from 0 again.",
            "",
            "| name | type | labels | what |",
            "| --- | --- | --- | --- |",
            *_metrics(),
            "",
            "## Classes whose calls fuse",
            "",
            "Arguments not named here are compared as plain Python values. The rules of other "
            "classes are [inferred and verified](numerics.md#tables-that-are-inferred).",
            "",
            "| class | method | arguments |",
            "| --- | --- | --- |",
            *_specs(),
            "",
        ]
    )


def _settings() -> Iterator[str]:
    engine = {field.name for field in dataclasses.fields(EngineSettings)}
    for field in dataclasses.fields(ServeSettings):
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        rule = field.metadata
        loads = (
            "yes"
            if field.name in engine
            else "jobs" * (field.name in JOBS) or "workers" * (field.name in WORKERS)
        )
        yield (
            f"| `--{field.name.replace('_', '-')}` | `{ENV_PREFIX}{field.name.upper()}` "
            f"| {default} | {rule['unit']} | {loads} | {rule['help']} |"
        )


def _commands(name: str, group: click.Group) -> Iterator[str]:
    settings = {field.name for field in dataclasses.fields(ServeSettings)}
    context = click.Context(group)
    commands = (group.get_command(context, key) for key in group.list_commands(context))
    for command in filter(None, commands):
        full_name = f"{name} {command.name}"
        if isinstance(command, click.Group):
            yield from _commands(full_name, command)
            continue
        arguments = [param.make_metavar(click.Context(command)) for param in command.params
                     if isinstance(param, click.Argument)]  # fmt: skip
        flags = [
            f"`{param.opts[-1]}`"
            for param in command.params
            if isinstance(param, click.Option) and (param.name not in settings or param.envvar)
        ]
        summary = command.get_short_help_str(200)
        yield f"| `{' '.join([full_name, *arguments])}` | {summary} | {' '.join(flags)} |"


def _errors() -> Iterator[str]:
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.CarpoolError):
            meaning = (cls.__doc__ or "").splitlines()[0]
            again = "may work" if cls.should_retry else ""
            yield f"| {cls.status} | `{cls.code}` | `{cls.__name__}` | {meaning} | {again} |"


def _metrics() -> Iterator[str]:
    for name, about in METRICS.items():
        labels = ", ".join(f"`{label}`" for label in about.labels)
        yield f"| `{name}` | {about.type} | {labels} | {about.text} |"


def _specs() -> Iterator[str]:
    for (name, method), spec in SPECS.items():
        rules = ", ".join(f"`{argument}` {spec.rule(argument).text()}" for argument in spec.rules)
        yield f"| {name} | {method} | {rules} |"


if __name__ == "__main__":
    (PAGE.parent / "carpool.schema.json").write_text(json.dumps(schema(), indent=2) + "\n")
    PAGE.write_text(page())
