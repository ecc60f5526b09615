"""Settings in a file: which wins, what is refused, and what `carpool config` says of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from carpool.cli.config_file import read_config, schema, sources
from carpool.cli.options import GROUPS, GroupedHelp
from carpool.config import ServeSettings
from carpool.errors import SettingRejected
from support.command_line import Run


def written(folder: Path, text: str) -> Path:
    file = folder / "carpool.yaml"
    file.write_text(text)
    return file


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "max-queue: 1\nmax_steps: 1\nmax_wait: 2\nlora: [a=x, b=y]\n")
    environ = {"CARPOOL_MAX_QUEUE": "2", "CARPOOL_MAX_STEPS": "2"}

    settings, came = sources({"max_queue": 3, "max_n": None, "lora": ()}, environ, file)

    assert (settings.max_queue, settings.max_steps, settings.max_wait) == (3, 2, 2.0)
    assert settings.lora == ("a=x", "b=y")
    assert came["max_queue"] == "--max-queue"
    assert came["max_steps"] == "CARPOOL_MAX_STEPS"
    assert came["max_wait"] == came["lora"] == str(file)
    assert came["port"] == "default"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_que: 1", "did you mean 'max_queue'"),
        ("max_queue: many", "must be a whole number"),
        ("max_queue: true", "must be a whole number"),
        ("max_queue: -1", "at least 0"),
        ("lora: 7", "must be a tuple of strings"),
        ("- a", "NAME: VALUE"),
        ("a: [", "cannot be read"),
        ("max-queue: 1\nmax_queue: 2", "there twice"),
        ("max_queue: 1\nmax_queue: 2", "'max_queue' is there twice"),
        ('{"port": 1, "port": 1}', "'port' is there twice"),
        ("!!python/object/apply:os.system [false]", "cannot be read"),
        ("model: 7", "model must be text"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingRejected, match=says):
        sources({}, {}, written(tmp_path, text))


def test_a_file_that_is_not_there_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(SettingRejected, match="No such file"):
        read_config(tmp_path / "none.yaml")
    assert read_config(written(tmp_path, "# nothing\n")) == {}


def test_serve_takes_its_model_and_settings_from_a_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []

    def serve(*given: Any) -> int:
        served.append(given)
        return 0

    monkeypatch.setattr("carpool.server.run.serve", serve)
    monkeypatch.setattr("carpool.worker.start.ForkingStarter.start_server", lambda _: None)
    monkeypatch.setattr("carpool.server.startup.set_limits", lambda: None)
    file = written(tmp_path, "model: shapes-video\nport: 0\nmax_queue: 5\nmax_n: 2\n")
    monkeypatch.setenv("CARPOOL_MAX_N", "3")
    monkeypatch.setenv("CARPOOL_FORKSERVER", "off")

    ended = run("serve", "--config", str(file), "--max-queue", "6")

    assert ended.status == 0, ended.err
    [([spec], settings, _)] = served
    assert spec.model == "shapes-video"
    assert (settings.port, settings.max_queue, settings.max_n) == (0, 6, 3)


def test_config_tells_what_is_in_force_and_hides_keys(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, "api_key: secret\nport: 9000\nwebhook_secret: whsec_hidden\n")

    some, all_ = run("config", "--config", str(file)), run("config", "--show")

    assert f"# {file}" in some.out
    assert "port:" in some.out
    assert '"secret"' not in some.out
    assert "whsec" not in some.out
    assert len(all_.out.splitlines()) == len(dataclasses.fields(ServeSettings))


def test_what_config_prints_is_a_file_that_means_the_same(run: Run, tmp_path: Path) -> None:
    printed = run("config", "--show", "--max-queue", "7", "--lora", "a=b").out

    settings, _ = sources({}, {}, written(tmp_path, printed))

    assert (settings.max_queue, settings.lora) == (7, ("a=b",))


def test_the_schema_knows_every_setting_and_the_published_one_is_the_same(run: Run) -> None:
    made = schema()
    published = Path(__file__).parents[2] / "docs/carpool.schema.json"

    assert made["properties"].keys() == {"model", "models", *get_type_hints(ServeSettings)}
    assert made["properties"]["max_queue"]["minimum"] == 0
    assert json.loads(run("config", "--schema").out) == made
    assert json.loads(published.read_text()) == made  # `make docs` writes it


def test_the_help_of_serve_fits_a_screen_and_names_the_rest(run: Run) -> None:
    short, whole = run("serve", "--help").out, run("serve", "--help-all").out

    names = [name for group in GROUPS.values() for name in group]
    for name in names:
        assert f"--{name.replace('_', '-')} " in short
    assert "--max-decode-gib" not in short
    assert "--max-decode-gib" in whole
    assert short.count("\n  --") <= 22  # of them --config and --help-all
    assert len(short.splitlines()) <= 52 < len(whole.splitlines())
    rest = len(GroupedHelp.rare) - len(names)
    assert f"{rest} more: --help-all" in short
    for name in GroupedHelp.rare:
        assert f"--{name.replace('_', '-')}" in whole
