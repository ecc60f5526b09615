"""`carpool generate --server`: the same as without one, drawn by a running server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from carpool.cli.generate import path_of
from carpool.media import read_settings
from carpool.media.inputs import transparent_mask
from support.command_line import Run
from support.pictures import gap, picture
from support.server_process import (
    DRAW,
    MODEL,
    PATIENCE_S,
    SIZE,
    Server,
    drawn_by_diffusers,
    serving,
)

pytestmark = pytest.mark.timeout(PATIENCE_S + 60)
KEY = "a-key"
FLAGS = [
    "--size", f"{SIZE[0]}x{SIZE[1]}", "--seed", "5", "--steps", str(DRAW["num_inference_steps"]),
    "-p", f"max_sequence_length={DRAW['max_sequence_length']}",
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--api-key", KEY) as server:
        yield server


@pytest.fixture
def draw(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("CARPOOL_API_KEY", KEY)
    return lambda *arguments: run("generate", "--server", server.url, *FLAGS, *arguments)


def test_a_server_draws_what_diffusers_draws_and_bars_are_no_result(draw: Run) -> None:
    ended = draw("a red circle", "-o", "{prompt}-{seed}.png")

    assert (ended.status, ended.out, ended.err) == (0, "a-red-circle-5.png\n", "")
    content = Path("a-red-circle-5.png").read_bytes()
    assert gap(picture(content).convert("RGB"), drawn_by_diffusers("a red circle", 5)) <= 2
    assert read_settings(content)["seed"] == 5


def test_prompts_of_a_file_share_the_server_and_are_told_in_their_order(draw: Run) -> None:
    Path("prompts.txt").write_text("a red circle\n\na blue square\n")

    ended = draw("--prompts-file", "prompts.txt", "--n", "2", "--json", "-o", "some.webp")

    told = [json.loads(line) for line in ended.out.splitlines()]
    assert [one["path"] for one in told] == [f"some-{i}.webp" for i in (1, 2, 3, 4)]
    assert [(one["prompt"], one["seed"]) for one in told] == [
        ("a red circle", 5), ("a red circle", 6), ("a blue square", 5), ("a blue square", 6),
    ]  # fmt: skip
    assert {picture(Path(one["path"]).read_bytes()).format for one in told} == {"WEBP"}


def test_an_edit_with_a_mask_is_the_one_that_is_drawn_without_a_server(draw: Run, run: Run) -> None:
    Image.new("RGB", SIZE, "blue").save("blue.png")
    white = Image.new("L", SIZE, 0)
    white.paste(255, (0, 0, SIZE[0] // 2, SIZE[1]))
    white.save("mask.png")
    given = ("a red circle", "--image", "blue.png", "--mask", "mask.png")

    there = draw(*given, "-o", "there.png")
    here = run("generate", "--model", MODEL, *FLAGS, *given, "-o", "here.png")

    assert (there.status, here.status) == (0, 0), there.err + here.err
    drawn = [picture(Path(f"{name}.png").read_bytes()).convert("RGB") for name in ("there", "here")]
    assert gap(*drawn) <= 2


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        (["--device", "cpu"], 2, "--device is the server's to decide"),
        (["--model", "other"], 1, "the server has no model 'other': it serves flux"),
        (["-o", "out.mp4"], 2, "the model makes pictures"),
        (["-p", "stepz=3"], 1, "stepz"),
        (["--image", "none.png"], 1, "none.png cannot be read"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    draw: Run, flags: list[str], status: int, says: str
) -> None:
    ended = draw("a red circle", *flags)

    assert ended.status == status
    assert says in ended.err
    assert ended.out == ""


def test_nobody_there_and_a_wrong_key_end_with_1(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARPOOL_API_KEY", "wrong")

    assert "API key" in run("generate", "a", "--server", server.url).err
    assert (
        "is `carpool serve` running" in run("generate", "a", "--server", "http://127.0.0.1:9").err
    )


def test_a_pattern_names_files_and_without_one_they_are_numbered() -> None:
    def name(pattern: str, count: int = 2) -> str:
        return path_of(Path(pattern), 1, count, 7, "A red/blue circle!").name

    assert name("{i}.png") == "2.png"
    assert name("{prompt}-{seed}.png") == "A-red-blue-circle-7.png"
    assert name("{seed}.png") == "7-2.png"  # prompts may share a seed
    assert name("out.png") == "out-2.png"
    assert name("out.png", count=1) == "out.png"
    assert path_of(Path("{prompt}.png"), 0, 1, 7, "../../etc").name == "etc.png"


def test_a_white_mask_becomes_a_transparent_one(tmp_path: Path) -> None:
    white = Image.new("L", (2, 1), 0)
    white.putpixel((1, 0), 255)
    white.save(tmp_path / "mask.png")

    mask = picture(transparent_mask((tmp_path / "mask.png").read_bytes()))

    assert list(mask.getchannel("A").tobytes()) == [255, 0]
