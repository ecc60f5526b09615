"""`carpool pull`: download a model from the hub in advance."""

import click


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
