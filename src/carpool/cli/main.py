"""The `carpool` command. Imports no torch until a command needs it.

Standard output has only results; bars and messages go to standard error. Exit status: 0 done,
1 failed, 2 usage error, 130 interrupted.
"""

import os
import sys

import click

import carpool
from carpool.cli.config_file import config
from carpool.cli.generate import generate
from carpool.cli.jobs import jobs
from carpool.cli.models import models, pull
from carpool.cli.plugins import Commands
from carpool.cli.serve import serve
from carpool.cli.top import top
from carpool.config import ENV_PREFIX
from carpool.errors import CarpoolError, SettingRejected


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(carpool.__version__)
def cli() -> None:
    """Serve diffusion models whose requests share every denoising step."""


for command in (config, jobs, serve, generate, models, pull, top):
    cli.add_command(command)


def main() -> None:
    """Run the command line; an error is one line on standard error."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # hides the library's warnings
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
