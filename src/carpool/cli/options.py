"""Settings as flags of commands."""

import dataclasses
import os
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from carpool.config import EngineSettings, ServeSettings
from carpool.setting_rules import base_type

Command = TypeVar("Command", bound=Callable[..., Any])


def settings_options(
    cls: type[EngineSettings], only: Collection[str] | None = None, *, hidden: bool = False
) -> Callable[[Command], Command]:
    """Add a flag for every setting of the class, with its default shown but not applied.

    So `ServeSettings.from_environment` can tell which flags were given.

    Args:
        only: names of the settings to add; None: all.
        hidden: leave them out of the help.
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
                type=click.Choice(get_args(hint)) if is_choice else base_type(hint),
                multiple=get_origin(hint) is tuple or rule["listed"],
                callback=_joined if rule["listed"] else None,
                default=None,
                metavar=rule["unit"].upper() or None,
                hidden=hidden,
                help=rule["help"] + default,
            )(command)
        return command

    return add


GROUPS: dict[str, tuple[str, ...]] = {
    "Address": ("host", "port", "api_key", "allowed_host", "served_model_name"),
    "Model": ("device", "dtype", "revision", "lora", "default_sampling_params"),
    "Batching": ("batching_mode", "max_batch_size", "max_running", "fair_share"),
    "Limits": ("max_queue", "max_wait", "max_pixels", "max_steps"),
    "Running it": ("state_dir", "log_level", "log_format", "playground"),
}
"""The flags that people use, as `carpool serve --help` shows them."""


class GroupedHelp(click.Command):
    """A command whose help shows the settings of `groups`; `--help-all` shows all of them."""

    groups = GROUPS
    settings: type[EngineSettings] = ServeSettings
    begins_with_groups = True

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        both = click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False,
            callback=self._show_all, help="Show all flags and exit.",
        )  # fmt: skip
        return [*super().get_params(ctx), both]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if ctx.meta.get("help_all"):
            super().format_options(ctx, formatter)
            return
        settings = {field.name for field in dataclasses.fields(self.settings)}
        records = {
            str(one.name): record
            for one in self.get_params(ctx)
            if isinstance(one, click.Option) and (record := one.get_help_record(ctx)) is not None
        }
        sections = {
            title: [(records[name][0], _short(records[name][1])) for name in names]
            for title, names in self.groups.items()
        }
        own = {"Options": [one for name, one in records.items() if name not in settings]}
        for title, rows in (sections | own if self.begins_with_groups else own | sections).items():
            with formatter.section(title):
                formatter.write_dl(rows)
        more = len(settings) - sum(map(len, self.groups.values()))
        formatter.write_paragraph()
        formatter.write_text(f"{more} more settings: --help-all")

    @staticmethod
    def _show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta["help_all"] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()


class GenerateHelp(GroupedHelp):
    """The help of `carpool generate`: its own options, then the settings that people use."""

    groups = {"Model": ("device", "dtype", "revision", "lora", "quantize", "memory")}
    settings = EngineSettings
    begins_with_groups = False


def _short(help_: str) -> str:
    """The help of a flag up to its first semicolon or colon, with its default."""
    text, mark, default = help_.partition("  [default: ")
    return text.split(";")[0] + (mark + default)


def _joined(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> str | None:
    """A flag that may be repeated, as one list."""
    return ",".join(values) or None


def settings_from(flags: dict[str, Any]) -> ServeSettings:
    """Settings from what was said on the command line, and else from the environment."""
    said = {name: value for name, value in flags.items() if value not in (None, ())}
    return ServeSettings.from_environment(os.environ, **said)


def measures_one_process(command: Command) -> Command:
    """Refuse `--context-parallel` of a command that loads a model into its own process only."""

    def refuse(context: click.Context, _: click.Parameter, ranks: int | None) -> None:
        if ranks is not None and ranks > 1:
            name = context.info_name
            raise click.UsageError(
                f"--context-parallel {ranks}: `carpool {name}` measures one process, and a group "
                f"of {ranks} loads one in each: leave it out; in `carpool serve` a group says what "
                "its forwards take in /stats (`costs`, `group`)"
            )

    return click.option(
        "--context-parallel", type=int, hidden=True, expose_value=False, callback=refuse
    )(command)
