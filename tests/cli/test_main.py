"""The command line: what it writes where, and with which exit status it ends."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from PIL import Image

import carpool
from carpool.cli.bars import AdvanceBar, Previews
from carpool.cli.main import cli
from carpool.config import EngineSettings, ServeSettings
from carpool.errors import PipelineFailed
from support.command_line import Run
from support.pictures import gap, picture, read_settings
from support.server_process import DRAW, MODEL, SIZE, drawn_by_diffusers

FLAGS = [
    "--model", MODEL, "--size", f"{SIZE[0]}x{SIZE[1]}", "--seed", "5",
    "--steps", str(DRAW["num_inference_steps"]),
    *(text for name in DRAW if name != "num_inference_steps"
      for text in ("-p", f"{name}={DRAW[name]}")),
]  # fmt: skip


# Help


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["jobs", "list"]], ids=str)
def test_help_needs_no_heavy_import(command: list[str]) -> None:
    code = """
import sys, carpool.cli.main
try:
    carpool.cli.main.main()
except SystemExit as end:
    assert not end.code, end
heavy = {"torch", "diffusers", "transformers", "fastapi", "uvicorn", "numpy", "httpx2"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    arguments = [sys.executable, "-c", code, *command, "--help"]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Usage:" in ended.stdout


@pytest.mark.parametrize("name", [*cli.list_commands(click.Context(cli)), "jobs list"])
def test_a_help_is_a_screen_at_most(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    assert len(run(*name.split(), "--help").out.splitlines()) <= 50


def test_the_package_alone_brings_its_nouns_and_no_library() -> None:
    code = """
import sys, carpool
ours = {name for name in sys.modules if name.split(".")[0] in ("carpool", "carpool_lab")}
assert ours == {"carpool", "carpool.types"}, ours
others = {"torch", "numpy", "PIL", "click", "pydantic", "msgspec", "httpx2"} & sys.modules.keys()
assert not others, others
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("command", "settings"), [("serve", ServeSettings), ("generate", EngineSettings)]
)
def test_every_setting_is_a_flag_with_its_default(
    run: Run, command: str, settings: type[EngineSettings]
) -> None:
    shown = " ".join(run(command, "--help-all").out.split())

    for field in dataclasses.fields(settings):
        assert f"--{field.name.replace('_', '-')} " in shown
        assert field.metadata["help"].split(";")[0].split()[0] in shown
        if field.default not in (None, ()):
            assert f"[default: {field.default}]" in shown


def test_the_help_of_generate_has_all_its_own_options_and_the_settings_that_people_use(
    run: Run,
) -> None:
    shown = run("generate", "--help").out

    for flag in ("--show", "--prompts-file", "--url", "--parameter", "--device", "--lora"):
        assert flag in shown
    assert "--max-batch-size" not in shown
    assert " more: --help-all" in shown


def test_the_version_is_told(run: Run) -> None:
    assert carpool.__version__ in run("--version").out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["plna"], "did you mean 'plan'?"),
        (["sevre"], "did you mean 'serve'?"),
        (["serve", "--batching-mode", "contniuous"], "did you mean 'continuous'?"),
        (["serve", "--dtype", "flaot32"], "did you mean 'float32'?"),
    ],
)
def test_a_slip_of_the_pen_is_answered_with_what_was_meant(
    run: Run, arguments: list[str], hint: str
) -> None:
    ended = run(*arguments)

    assert ended.status == 2
    assert hint in ended.err


# Pictures


def test_a_picture_is_written_with_its_settings_and_only_its_name_is_printed(run: Run) -> None:
    ended = run("generate", "a red circle", *FLAGS, "--guidance", "2.5")

    assert (ended.status, ended.out) == (0, "out.png\n")
    assert re.fullmatch(r"out.png: seed 5, \d+\.\d s\n", ended.err)
    png = Path("out.png").read_bytes()
    assert gap(picture(png), drawn_by_diffusers("a red circle", 5, guidance_scale=2.5)) <= 1
    settings = read_settings(png)
    assert settings.pop("engine")["scheduler"] == "FlowMatchEulerDiscreteScheduler"
    assert settings == {
        **DRAW, "model": MODEL, "prompt": "a red circle", "seed": 5, "guidance_scale": 2.5,
        "true_cfg_scale": 1.0, "width": SIZE[0], "height": SIZE[1],
    }  # fmt: skip


def test_a_picture_is_drawn_by_the_sampler_that_is_named_and_says_so(run: Run) -> None:
    own = run("generate", "a red circle", *FLAGS)
    first = Path("out.png").read_bytes()

    ended = run("generate", "a red circle", *FLAGS, "--scheduler", "Euler Karras")
    refused = run("generate", "a red circle", *FLAGS, "--scheduler", "DPM++ 2M")

    assert (own.status, ended.status) == (0, 0), ended.err
    settings = read_settings(Path("out.png").read_bytes())
    assert settings["scheduler"] == "euler_karras"
    assert settings["engine"]["scheduler_config"]["use_karras_sigmas"]
    assert gap(picture(Path("out.png").read_bytes()), picture(first)) > 1
    assert refused.status == 1
    assert "FlowMatchEulerDiscreteScheduler is not compatible" in refused.err


def test_the_seed_is_said_and_a_file_is_not_replaced_in_silence(run: Run) -> None:
    unseeded = [flag for flag in FLAGS if flag not in ("--seed", "5")]
    first = run("generate", "a red circle", *unseeded, "--json")
    seed = json.loads(first.out)["seed"]

    again = run("generate", "a red circle", *unseeded, "--seed", str(seed))

    assert f"out.png: seed {seed}, " in first.err
    assert "replaces" not in first.err
    assert "; it replaces a file of that name" in again.err


@pytest.mark.parametrize(
    ("flags", "environ", "told"),
    [
        ([], {}, {"prompt": "a", "seed": 5}),
        (["--no-metadata-prompt"], {}, {"prompt": None, "seed": 5}),
        (["--no-metadata"], {}, {"prompt": None, "seed": None}),
        ([], {"CARPOOL_METADATA": "false"}, {"prompt": None, "seed": None}),
    ],
    ids=str,
)
def test_a_picture_tells_of_itself_what_is_wanted(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    environ: dict[str, str],
    told: dict[str, Any],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    line = json.loads(run("generate", "a", *FLAGS, *flags, "--json").out)

    assert (line["prompt"], line["seed"]) == ("a", 5)  # whatever the file says
    png = Path("out.png").read_bytes()
    assert {name: read_settings(png).get(name) for name in told} == told
    assert (b"trainedAlgorithmicMedia" in png) is (told["seed"] is not None)


def test_several_pictures_are_numbered_and_told_as_json(run: Run) -> None:
    flags = ("--n", "2", "--json", "-o", "a.webp", "-p", "true_cfg_scale=2")

    ended = run("generate", "one", "two", *FLAGS, *flags, "--negative-prompt", "three")

    assert ended.status == 0
    told = [json.loads(line) for line in ended.out.splitlines()]
    assert [(one["path"], one["prompt"], one["seed"]) for one in told] == [
        ("a-1.webp", "one", 5), ("a-2.webp", "one", 6), ("a-3.webp", "two", 5),
        ("a-4.webp", "two", 6),
    ]  # fmt: skip
    for one in told:
        assert (one["negative_prompt"], one["true_cfg_scale"]) == ("three", 2)
        assert one["timings"]["total_s"] > 0
        assert picture(Path(one["path"]).read_bytes()).format == "WEBP"
    assert len({Path(one["path"]).read_bytes() for one in told}) == 4


def test_prompts_come_from_a_file_too(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one ⭐\n\n  two\n", encoding="utf-8")
    (tmp_path / "to").mkdir()

    ended = run("generate", "--prompts-file", str(prompts), *FLAGS, "-o", "to/x.png", "zero")

    assert ended.out.splitlines() == ["to/x-1.png", "to/x-2.png", "to/x-3.png"]
    drawn = [read_settings(Path(path).read_bytes())["prompt"] for path in ended.out.splitlines()]
    assert drawn == ["zero", "one ⭐", "two"]


def test_the_size_is_told_also_when_only_one_side_was_said(run: Run) -> None:
    flags = [*FLAGS[:2], *FLAGS[4:], "-p", "width=64", "--json"]  # without --size

    told = json.loads(run("generate", "a", *flags).out)

    assert (told["width"], told["height"]) == picture(Path("out.png").read_bytes()).size


# Used wrongly


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a prompt"),
        (["a", "-o", "a.gif"], "must end in one of .png"),
        (["a", "-o", "nowhere/a.png"], "there is no folder nowhere"),
        (["a", "--size", "64"], "WIDTHxHEIGHT"),
        (["a", "--size", "-64x64"], "WIDTHxHEIGHT"),
        (["a", "--n", "0"], "--n"),
        (["a", "--steps", "many"], "--steps"),
        (["a", "-p", "guidance"], "NAME=VALUE"),
        (["a", "-p", "seed=1"], "use --seed"),
        (["a", "-p", "prompt=b"], "give it as an argument"),
        (["a", "-p", "output_type=latent"], "use --output"),
        (["a", "-p", "return_errors=true"], "not taken"),
        (["a", "--prompts-file", "nowhere.txt"], "nowhere.txt"),
        (["a", "--nonsense"], "--nonsense"),
        (["a", "--dtype", "int8"], "float32"),
        (["a", "-o", "folder.png"], "is a folder"),
        (["a", "--steps", "2", "-p", "num_inference_steps=3"], "given twice"),
        (["a", "-p", "width=64", "--size", "64x64"], "given twice"),
        (["a", "--n", "1000000000"], "--n"),
        (["a", "--fps", "8"], "the model makes pictures"),
        (["a", "--fps", "0", "--model", "shapes-video"], "--fps"),
        (["a", "--max-running", "0"], "at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_ends_with_2_before_anything_is_loaded(
    run: Run, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()

    ended = run("generate", *arguments)

    assert (ended.status, ended.out) == (2, "")
    assert message in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("flag", ["--api-key=", "--max-queue=-1", "--port=-1", "--port=x"])
def test_a_wrong_flag_of_serve_ends_with_2(run: Run, flag: str) -> None:
    ended = run("serve", flag)

    assert (ended.status, ended.out) == (2, "")
    assert flag.partition("=")[0].strip("-").replace("-", "_") in ended.err.replace("-", "_")


@pytest.mark.parametrize("command", [["serve"], ["generate", "a"]], ids=["serve", "generate"])
def test_a_wrong_variable_ends_with_2_and_a_hint(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("CARPOOL_MAX_QUEU", "4")
    ended = run(*command)

    assert (ended.status, ended.out) == (2, "")
    [line] = ended.err.splitlines()
    assert line.startswith("carpool: ")
    assert "did you mean 'CARPOOL_MAX_QUEUE'" in line


def test_each_picture_has_a_bar_that_its_own_steps_move(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[tuple[int, float]] = []

    @contextmanager
    def bars(names: Sequence[str], previews: Previews | None) -> Iterator[AdvanceBar]:
        assert names == ["one", "one", "two", "two"]
        assert previews is None  # without --show
        yield lambda place, done: moves.append((place, done))

    monkeypatch.setattr("carpool.cli.generate.bars", bars)

    assert run("generate", "one", "two", *FLAGS, "--n", "2").status == 0

    for place in range(4):
        mine = [done for moved, done in moves if moved == place]
        steps = int(DRAW["num_inference_steps"])
        assert mine == sorted(mine)
        assert mine[0] == 0.0
        assert mine[-1] == 1.0
        assert {(i + 1) / steps for i in range(steps - 1)} <= set(mine)


def test_what_is_drawn_so_far_is_shown_where_the_terminal_can(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Previews] = []

    @contextmanager
    def bars(names: Sequence[str], previews: Previews) -> Iterator[AdvanceBar]:
        seen.append(previews)
        yield lambda place, done: None

    monkeypatch.setattr("carpool.cli.generate.bars", bars)
    monkeypatch.setattr("carpool.cli.generate.why_not", lambda environ: None)

    assert run("generate", "one", "two", *FLAGS, "--show").status == 0

    assert len(seen[0].table(200).columns) == 2


def test_what_the_others_made_is_written_before_a_failure_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = carpool.Engine.generate

    def failing(self: carpool.Engine, *requests: Any, **more: Any) -> list[carpool.Output]:
        one, two, three = drawn(self, *requests, **more)
        return [one, dataclasses.replace(two, images=None, error=PipelineFailed("no")), three]

    monkeypatch.setattr(carpool.Engine, "generate", failing)

    ended = run("generate", "one", "two", "three", *FLAGS)

    assert ended.status == 1
    assert ended.out.split() == ["out-1.png", "out-3.png"]
    assert "carpool: no" in ended.err


# What the model refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "no model at '/nowhere'"),
        (["--size", "65x64"], "the nearest size is 64x64"),
        (["-p", "num_steps=4"], "did you mean 'num_inference_steps'"),
        (["--steps", "0"], "from 1 to 1000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_drawn_ends_with_1_and_one_line(
    run: Run, arguments: list[str], message: str
) -> None:
    ended = run("generate", "a", *FLAGS, *arguments)

    assert (ended.status, ended.out) == (1, "")
    told = [line for line in ended.err.splitlines() if line.startswith("carpool: ")]
    assert len(told) == 1
    assert message in told[0]
    assert "Traceback" not in ended.err
    assert not Path("out.png").exists()


def test_an_interrupt_ends_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("carpool.python.engine.load", interrupt)

    assert run("generate", "a").status == 130


# Pictures in, videos out


def test_a_picture_and_a_mask_go_in_and_what_is_not_masked_stays(run: Run, tmp_path: Path) -> None:
    Image.new("RGB", SIZE, "blue").save(tmp_path / "before.png")
    mask = Image.new("L", SIZE, 0)
    mask.paste(255, (SIZE[0] // 2, 0, *SIZE))
    mask.save(tmp_path / "right.png")

    def drawn(prompt: str, *flags: str) -> "np.ndarray[Any, Any]":
        given = ["--image", "before.png", "-o", "after.png", *FLAGS, *flags]
        assert run("generate", prompt, *given).status == 0
        return np.asarray(Image.open(tmp_path / "after.png")).astype(int)

    cat, dog = (drawn(prompt, "--mask", "right.png") for prompt in ("a cat", "a dog"))
    changed = abs(cat - dog).max(axis=(0, 2))  # by column
    assert changed[: SIZE[0] // 4].max() <= 1 < changed[SIZE[0] // 2 :].max()
    assert abs(cat - drawn("a cat", "-p", "strength=0.5")).max() > 20
    assert "prompt" in run("generate", "--image", "before.png", *FLAGS).err  # asked by the model


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-o", "out.mp4"], "the model makes pictures: use .png"),
        (["--image", "missing.png"], "missing.png: not a picture that can be read"),
    ],
)
def test_files_that_do_not_fit_are_refused(run: Run, flags: list[str], says: str) -> None:
    ended = run("generate", "a cat", *FLAGS, *flags)

    assert ended.status in (1, 2)
    assert says in ended.err
