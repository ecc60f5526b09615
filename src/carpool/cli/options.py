"""Settings as flags of commands."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from carpool.config import EngineSettings, ServeSettings
from carpool.errors import nearest
from carpool.settings.rules import base_type


class SettingChoice(click.Choice[str]):
    """A choice whose error names the nearest valid value."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        hint = nearest(str(value), self.choices)
        return super().get_invalid_choice_message(value, ctx) + hint


Command = TypeVar("Command", bound=Callable[..., Any])


def settings_options(
    cls: type[EngineSettings], only: Collection[str] | None = None, *, hidden: bool = False
) -> Callable[[Command], Command]:
    """Add a flag for every setting of the class; defaults are shown but not applied.

    So `ServeSettings.from_environment` can detect the explicit flags.

    Args:
        only: names of the settings to add; None: all.
        hidden: omit them from the help.
    """

    def add(command: Command) -> Command:
        hints = get_type_hints(cls)
        for field in reversed(dataclasses.fields(cls)):
            if only is not None and field.name not in only:
                continue
            hint, rule = hints[field.name], field.metadata
            is_choice, is_flag = get_origin(hint) is Literal, hint is bool
            default = "" if field.default in (None, ()) else f"  [default: {field.default}]"
            flag = field.name.replace("_", "-")
            command = click.option(
                f"--{flag}/--no-{flag}" if is_flag else f"--{flag}",
                type=SettingChoice(get_args(hint)) if is_choice else base_type(hint),
                multiple=get_origin(hint) is tuple or rule["listed"],
                callback=_joined if rule["listed"] else None,
                default=None,
                metavar=rule["unit"].upper() or None,
                hidden=hidden,
                help=rule["help"] + default,
            )(command)
        return command

    return add


parameter_option = click.option(
    "-p", "--parameter", multiple=True, metavar="NAME=VALUE",
    help="any other parameter of the pipeline; VALUE as JSON or plain text",
)  # fmt: skip

GROUPS: dict[str, tuple[str, ...]] = {
    "Address": ("host", "port", "api_key"),
    "Model": ("device", "workers", "dtype", "quantize", "memory", "lora"),
    "Batching": ("batching_mode", "max_batch_size", "max_running"),
    "Limits": ("max_queue", "max_wait"),
    "Running it": ("state_dir", "playground"),
    "Options": (),  # all that are not rare
}
"""The most used flags, for `carpool serve --help`: one screen."""


def _names(cls: type[EngineSettings]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


class GroupedHelp(click.Command):
    """A command whose help shows of its `rare` options those of `groups`; `--help-all` all."""

    groups = GROUPS
    rare = (*_names(ServeSettings), "model_path", "deploy_config")

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        all_option = click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False,
            callback=self._show_all, help="Show all flags and exit.",
        )  # fmt: skip
        return [*super().get_params(ctx), all_option]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if ctx.meta.get("help_all"):
            super().format_options(ctx, formatter)
            return
        groups = self.groups
        records = {
            str(option.name): _record(option, ctx)
            for option in self.get_params(ctx)
            if isinstance(option, click.Option) and not option.hidden
        }
        sections = {title: [records[name] for name in names] for title, names in groups.items()}
        sections["Options"] = [line for name, line in records.items() if name not in self.rare]
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        rest = len(self.rare) - sum(map(len, groups.values()))
        formatter.write_paragraph()
        formatter.write_text(f"{rest} more: --help-all")

    @staticmethod
    def _show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta["help_all"] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()


class GenerateHelp(GroupedHelp):
    """The help of `carpool generate`: its own options, then the most used settings."""

    groups = {"Options": (), "Model": ("device", "dtype", "revision", "lora", "quantize", "memory")}
    rare = _names(EngineSettings)


def help_without(*rare: str) -> type[GroupedHelp]:
    """A class of commands whose help leaves some of their options to `--help-all`."""
    return type("ShortHelp", (GroupedHelp,), {"groups": {}, "rare": rare})


def _record(option: click.Option, ctx: click.Context) -> tuple[str, str]:
    """A flag for the short help: help text up to the first semicolon, and default."""
    names, text = option.get_help_record(ctx) or ("", "")
    text, mark, default = text.partition("  [default: ")
    if isinstance(option.type, click.Choice):
        return f"{option.opts[0]} NAME", "|".join(option.type.choices) + mark + default
    return names, text.split(";")[0] + (mark + default)


def _joined(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Join the values of a repeated flag."""
    return ",".join(values) or None


def settings_from(flags: dict[str, Any]) -> ServeSettings:
    """Settings from the command line, otherwise from the environment."""
    return ServeSettings.from_environment(os.environ, **flags)


def refuse(flags: Mapping[str, Any], rule: str) -> None:
    """Refuse flags that have no effect in a command."""
    for name, value in flags.items():
        if value not in (None, ()):
            raise click.UsageError(f"--{name.replace('_', '-')} {rule}")


def measures_one_process(command: Command) -> Command:
    """Refuse `--context-parallel` in a command that loads the model into its own process."""

    def refuse(context: click.Context, _: click.Parameter, ranks: int | None) -> None:
        if ranks is not None and ranks > 1:
            raise click.UsageError(
                f"--context-parallel {ranks}: `carpool {context.info_name}` measures one process, "
                f"and a group needs {ranks}: leave it out; for a group of `carpool serve`, /stats "
                "reports the times of its forwards (`costs`, `group`)"
            )

    return click.option(
        "--context-parallel", type=int, hidden=True, expose_value=False, callback=refuse
    )(command)
