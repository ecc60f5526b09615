"""`carpool generate --url`: the same as without one, drawn by a running server."""

import base64
import io
import json
import os
import pty
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from carpool.cli.files import path_of
from carpool.cli.jobs import ServerClient
from carpool.errors import Overloaded
from carpool.media.inputs import transparent_mask
from support.command_line import Run
from support.pictures import gap, picture, read_settings
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
BLOCKS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
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
    return lambda *arguments: run("generate", "--url", server.url, *FLAGS, *arguments)


def test_a_server_draws_what_diffusers_draws_and_bars_are_no_result(draw: Run) -> None:
    ended = draw("a red circle", "-o", "{prompt}-{seed}.png")

    assert (ended.status, ended.out) == (0, "a-red-circle-5.png\n")
    assert re.fullmatch(r"a-red-circle-5.png: seed 5, \d+\.\d s\n", ended.err)
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
        (["--no-metadata"], 2, "--metadata is the server's to decide"),
        (["--no-metadata-prompt"], 2, "--metadata-prompt is the server's to decide"),
        (["--mask", "mask.png"], 2, "--mask marks where to redraw --image"),
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


def test_a_wrong_key_is_told(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_API_KEY", "wrong")

    assert "API key" in run("generate", "a", "--url", server.url).err


def test_a_pattern_names_files_and_without_one_they_are_numbered() -> None:
    def name(pattern: str, count: int = 2) -> str:
        return path_of(Path(pattern), 1, count, 7, "A red/blue circle!", set()).name

    assert name("{i}.png") == "2.png"
    assert name("{prompt}-{seed}.png") == "A-red-blue-circle-7.png"
    assert name("{seed}.png") == "7-2.png"  # prompts may share a seed
    assert name("out.png") == "out-2.png"
    assert name("out.png", count=1) == "out.png"
    assert path_of(Path("{prompt}.png"), 0, 1, 7, "../../etc", set()).name == "etc.png"


def test_no_file_is_written_over_by_another_one_of_the_same_name() -> None:
    pattern, taken = Path("{prompt}-{seed}.png"), set[Path]()
    for i, prompt in enumerate(["a/b", "a b", "a b"]):
        taken.add(path_of(pattern, i, 3, 7, prompt, taken))

    assert {path.name for path in taken} == {"a-b-7.png", "a-b-7-2.png", "a-b-7-3.png"}


def test_standard_input_gives_prompts_and_show_without_a_terminal_is_only_a_sentence(
    draw: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("a café\na dog".encode())))

    ended = draw("--prompts-file", "-", "--show", "-o", "{prompt}.png")

    assert ended.status == 0, ended.err
    assert ended.out.split() == ["a-café-1.png", "a-dog-2.png"]
    assert "--show: standard output is not a terminal" in ended.err


def test_what_the_others_made_is_written_before_a_failure_is_told(
    draw: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ServerClient.ask

    def failing(self: ServerClient, method: str, *path: str, **query: Any) -> dict[str, Any]:
        job = asked(self, method, *path, **query)
        is_second = job.get("settings", {}).get("prompt") == "a blue square"
        if is_second and job["status"] == "completed":
            job |= {"status": "failed", "error": {"message": "out of memory"}}
        return job

    monkeypatch.setattr(ServerClient, "ask", failing)

    ended = draw("a red circle", "a blue square", "a green ring")

    assert ended.status == 1
    assert ended.out.split() == ["out-1.png", "out-3.png"]
    assert "failed: out of memory" in ended.err


def test_a_white_mask_becomes_a_transparent_one(tmp_path: Path) -> None:
    white = Image.new("L", (2, 1), 0)
    white.putpixel((1, 0), 255)
    white.save(tmp_path / "mask.png")

    mask = picture(transparent_mask((tmp_path / "mask.png").read_bytes()))

    assert list(mask.getchannel("A").tobytes()) == [255, 0]


def test_a_list_longer_than_the_server_takes_at_once_is_sent_bit_by_bit(
    draw: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_at, asked = ServerClient.ask_at, []

    def limited(self: ServerClient, method: str, path: str, **sent: Any) -> dict[str, Any]:
        if method == "POST" and path.startswith("v1/images"):
            asked.append(sent["json"]["prompt"])
            if len(asked) in (2, 4):
                raise Overloaded("the queue is full")
        return ask_at(self, method, path, **sent)

    monkeypatch.setattr(ServerClient, "ask_at", limited)

    ended = draw("one", "two", "three")

    assert ended.status == 0, ended.err
    assert ended.out.split() == ["out-1.png", "out-2.png", "out-3.png"]
    assert asked == ["one", "two", "two", "three", "three"]

    monkeypatch.setattr("carpool.cli.remote.POLL_S", 0.0)
    asked[:] = ["of before"]
    refused = draw("one")
    assert (refused.status, refused.out) == (1, "")
    assert "the queue is full" in refused.err


# Pictures in the terminal


def shown(server: Server, terminal: Mapping[str, str], *flags: str) -> str:
    """What `carpool generate --show` writes to a terminal with these variables."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    command = [
        sys.executable, "-m", "carpool", "generate", "--url", server.url, "a red circle",
        "--show", *FLAGS, "--api-key", KEY, *flags,
    ]  # fmt: skip
    process, terminal_fd = pty.fork()
    if process == 0:  # the child: only exec is safe
        os.execve(sys.executable, command, {**kept, **terminal})
    written = b""
    try:
        while chunk := os.read(terminal_fd, 1 << 16):
            written += chunk
    except OSError:  # its end, as Linux says it
        pass
    finally:
        os.close(terminal_fd)
        _, status = os.waitpid(process, 0)
    assert status == 0, written
    return written.decode()


def test_what_a_server_draws_is_seen_below_the_bar_before_it_is_done(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    while_drawn, _, _ = shown(server, BLOCKS, "--steps", "400").partition("out.png")

    assert "\u2580" in while_drawn


def test_each_protocol_carries_the_picture_that_was_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    kitty = shown(server, {"TERM": "xterm-kitty"})
    iterm2 = shown(server, {"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"})

    drawn = Image.open("out.png").convert("RGB").tobytes()
    chunks = re.findall("\033_G([^;]*);([A-Za-z0-9+/=]*)\033\\\\", kitty)
    assert chunks[0][0].startswith("a=T,f=100,q=2,")
    assert [control[-3:] for control, _ in chunks] == ["m=1"] * (len(chunks) - 1) + ["m=0"]
    assert max(len(data) for _, data in chunks) <= 4096
    [(size, data)] = re.findall("\033]1337;File=inline=1;size=([0-9]+);[^:]*:([^\a]*)\a", iterm2)
    assert int(size) == len(base64.b64decode(data))
    for sent in ("".join(data for _, data in chunks), data):
        picture = Image.open(io.BytesIO(base64.b64decode(sent)))
        assert (picture.format, picture.tobytes()) == ("PNG", drawn)


def test_elsewhere_half_blocks_have_the_colours_of_the_picture(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    bar, _, written = shown(server, BLOCKS).partition("out.png")

    drawn = Image.open("out.png").convert("RGB")
    columns = min(48, drawn.width)
    small = drawn.resize((columns, 2 * round(columns * drawn.height / drawn.width / 2)))
    pairs = re.findall(
        "\033\\[38;2;([0-9]+);([0-9]+);([0-9]+);48;2;([0-9]+);([0-9]+);([0-9]+)m\u2580", written
    )
    top = [tuple(map(int, pair[:3])) for pair in pairs[:columns]]
    below = [tuple(map(int, pair[3:])) for pair in pairs[:columns]]
    assert top == [small.getpixel((x, 0)) for x in range(columns)]
    assert below == [small.getpixel((x, 1)) for x in range(columns)]
    assert len(pairs) == columns * small.height // 2
    assert "a red circle" in bar  # its bar


def test_a_terminal_without_colours_gets_the_file_and_a_sentence(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    written = shown(server, {"TERM": "dumb"})

    assert "--show: TERM says that this terminal cannot show colours" in written
    assert "\u2580" not in written
    assert "out.png" in written
