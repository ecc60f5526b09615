"""Commands that packages add by entry points: they work, or say why not; nothing else breaks."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import click
import pytest
from click.testing import CliRunner, Result

from carpool.cli import plugins
from carpool.cli.main import cli
from carpool.cli.plugins import GROUP, LAB
from carpool.errors import CarpoolError

OWN = {"config", "pull", "top", "generate", "jobs", "models", "serve"}


@click.command()
def hello() -> None:
    """Say hello."""
    click.echo("hello")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    plugins.added_commands.cache_clear()
    yield
    plugins.added_commands.cache_clear()


def run(monkeypatch: pytest.MonkeyPatch, added: dict[str, str], *arguments: str) -> Result:
    """Run `carpool` with these entry points installed, by name."""
    installed = [EntryPoint(name, value, GROUP) for name, value in added.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda group: installed)
    return CliRunner().invoke(cli, arguments)


def listed(ended: Result) -> dict[str, str]:
    """Commands that a help text lists, with their help."""
    lines = ended.output.split("Commands:\n")[1].splitlines()
    rows = (line.split(maxsplit=1) for line in lines if line.startswith("  ") and line[2] != " ")
    return {name: " ".join(text) for name, *text in rows}


def test_a_command_of_another_package_is_listed_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    added = {"hello": f"{__name__}:hello"}

    assert listed(run(monkeypatch, added, "--help"))["hello"] == "Say hello."
    assert run(monkeypatch, added, "hello").output == "hello\n"


def test_the_laboratory_adds_its_commands() -> None:
    assert set(listed(CliRunner().invoke(cli, ["--help"]))) == OWN | set(LAB)


@pytest.mark.parametrize("name", LAB)
def test_a_command_of_the_laboratory_shows_its_help(name: str) -> None:
    ended = CliRunner().invoke(cli, [name, "--help"])

    assert ended.exit_code == 0
    assert f"Usage: cli {name}" in ended.output


def test_a_list_of_commands_says_of_the_laboratory_what_it_says_and_does_not_import_it() -> None:
    program = """
import sys
from carpool.cli.main import cli
try:
    cli(["--help"])
finally:
    print(sorted(name for name in sys.modules if name.startswith(("carpool_lab", "torch"))))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr
    for name, said in LAB.items():
        command = plugins.added_commands()[name].load()
        assert command.get_short_help_str(limit=200) == said


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_command_of_carpool_cannot_be_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run(monkeypatch, {name: f"{__name__}:hello"}, name, "--help")

    assert "Say hello" not in ended.output
    assert ended.exit_code == 0


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_package:command", "ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{__name__}:no_such_name", "AttributeError"),
        (f"{__name__}:OWN", "is no click command"),
        ("a plain mistake", "ValueError|AttributeError|ModuleNotFoundError"),
    ],
)
def test_a_command_that_cannot_be_loaded_says_why_and_breaks_nothing_else(
    value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = {"broken": value, "hello": f"{__name__}:hello"}

    shown = listed(run(monkeypatch, added, "--help"))
    ended = run(monkeypatch, added, "broken", "--some-flag", "an argument")

    assert shown["broken"].startswith("Not available")
    assert shown.keys() >= OWN | {"hello"}
    assert run(monkeypatch, added, "hello").output == "hello\n"
    assert isinstance(ended.exception, CarpoolError)
    with pytest.raises(CarpoolError, match=rf"'broken' cannot be loaded: .*({reason})"):
        raise ended.exception


def test_a_module_that_ends_the_process_on_import_breaks_nothing(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: EntryPoint) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(EntryPoint, "load", end)

    ended = run(monkeypatch, {"broken": "some:where"}, "--help")

    assert ended.exit_code == 0
    assert listed(ended)["broken"].startswith("Not available: some:where: SystemExit: 3")


@pytest.mark.parametrize("name", LAB)
def test_without_the_laboratory_its_commands_say_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = listed(run(monkeypatch, {}, "--help"))
    ended = run(monkeypatch, {}, name, "--num-prompts", "3")

    assert set(shown) == OWN
    assert isinstance(ended.exception, CarpoolError)
    with pytest.raises(
        CarpoolError, match=r"carpool_lab is not installed; .*from its checkout or wheel"
    ):
        raise ended.exception


def test_of_two_packages_with_one_name_the_same_one_is_chosen_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = [EntryPoint("hello", f"{__name__}:hello", GROUP), EntryPoint("hello", "b:c", GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: pair)

    assert CliRunner().invoke(cli, ["hello"]).output == "hello\n"
