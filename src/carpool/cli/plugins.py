"""The command group of `carpool`: its own commands, and commands of installed packages.

A package adds a command by an entry point of the group `carpool.commands` that names a
`click.Command`. It cannot replace commands of `carpool`. A command that fails to load is listed
with the reason, and fails when used; other commands work.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from carpool.errors import CarpoolError, nearest

GROUP = "carpool.commands"
LAB = {  # commands of `carpool_lab` in the same wheel; with help, so lists need no import
    "bench": "Send load to an OpenAI-compatible server and report the results.",
    "check": "Prove on this machine that requests of MODEL get the same answers together and "
    "alone.",
    "plan": "Predict memory and speed of MODEL on other devices, from configs alone.",
    "simulate": "Predict the performance of a scheduling mode, without a model or a device.",
}


class Commands(click.Group):
    """Own commands, and commands of entry points, imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *added_commands()})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = {name: self._listed(ctx, name) for name in self.list_commands(ctx)}
        click.Group(commands=commands).format_commands(ctx, formatter)

    def _listed(self, ctx: click.Context, name: str) -> click.Command:
        """A command for a list, with name and help; own commands are not imported."""
        added = added_commands().get(name)
        if name in LAB and added is not None and added.module.startswith("carpool_lab."):
            return click.Command(name, help=LAB[name])
        command = self.get_command(ctx, name)
        assert command is not None, "it is listed"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's, but it also suggests commands of packages."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            hint = nearest(name, self.list_commands(ctx))
            raise click.UsageError(f"No such command {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        if (added := added_commands().get(cmd_name)) is not None:
            return _load(added)
        if cmd_name in LAB:
            return _broken(cmd_name, "the package carpool_lab is not installed")
        return None


@cache
def added_commands() -> dict[str, EntryPoint]:
    """Entry points by name; if several share a name, the first package by name wins."""
    plugins = entry_points(group=GROUP)
    by_package = sorted(plugins, key=lambda plugin: plugin.dist.name if plugin.dist else "")
    return {plugin.name: plugin for plugin in reversed(by_package)}


def _load(added: EntryPoint) -> click.Command:
    try:
        command: Any = added.load()
    except (Exception, SystemExit) as error:  # a foreign module may raise anything
        return _broken(added.name, f"{added.value}: {type(error).__name__}: {error}", error)
    if not isinstance(command, click.Command):
        return _broken(added.name, f"{added.value} is no click command")
    return command


def _broken(name: str, reason: str, cause: BaseException | None = None) -> click.Command:
    """A command that reports why the real command cannot be loaded."""

    def fail() -> None:
        fix = "install the package that adds it again, from its checkout or wheel"
        raise CarpoolError(f"the command {name!r} cannot be loaded: {reason}; {fix}") from cause

    return click.Command(
        name,
        callback=fail,
        help=f"Not available: {reason}",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
