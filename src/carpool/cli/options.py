"""Settings as flags of commands."""

import dataclasses
import os
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from carpool.config import EngineSettings, ServeSettings, base_type

Command = TypeVar("Command", bound=Callable[..., Any])


def settings_options(
    cls: type[EngineSettings], only: Collection[str] | None = None
) -> Callable[[Command], Command]:
    """Add a flag for every setting of the class, with its default shown but not applied.

    So `ServeSettings.from_environment` can tell which flags were given.

    Args:
        only: names of the settings to add; None: all.
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
                help=rule["help"] + default,
            )(command)
        return command

    return add


def _joined(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> str | None:
    """A flag that may be repeated, as one list."""
    return ",".join(values) or None


def settings_from(flags: dict[str, Any]) -> ServeSettings:
    """Settings from what was said on the command line, and else from the environment."""
    said = {name: value for name, value in flags.items() if value not in (None, ())}
    return ServeSettings.from_environment(os.environ, **said)
