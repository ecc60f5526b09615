"""The `carpool` command. Imports no torch until a command needs it.

Standard output carries results only; bars and messages go to standard error. Exit status: 0 done,
1 failed, 2 used wrongly, 130 interrupted.
"""

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import click

import carpool
from carpool.cli.generate import generate
from carpool.cli.jobs import jobs
from carpool.cli.serve import serve
from carpool.config import ENV_PREFIX
from carpool.errors import CarpoolError, SettingRejected


class Commands(click.Group):
    """The commands of this package, and those that installed packages add.

    Those are entry points of the group `carpool.commands`, each a `click.Command`; a module is
    imported when its command is asked for.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(one.name for one in added_commands())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = super().get_command(ctx, cmd_name)
        if known is not None:
            return known
        found = [one for one in added_commands() if one.name == cmd_name]
        return found[0].load() if found else None


@cache
def added_commands() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group="carpool.commands"))


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(carpool.__version__)
def cli() -> None:
    """Serve diffusion models whose requests share every denoising step."""


for command in (jobs, serve, generate):
    cli.add_command(command)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def models(as_json: bool) -> None:
    """List the models that are proven, and what fuses of each. Others run too."""
    import json

    from carpool.models.grid import rows, table

    click.echo(json.dumps(rows(), indent=1) if as_json else "\n".join(table()))


def main() -> None:
    """Run the command line; failures are one line on standard error."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except SettingRejected as error:
        click.echo(f"carpool: {error} (flags and {ENV_PREFIX}* variables)", err=True)
        sys.exit(2)
    except (CarpoolError, OSError) as error:
        click.echo(f"carpool: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
