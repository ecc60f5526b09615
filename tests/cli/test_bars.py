"""Bars of `carpool generate`: one a picture, and of many only those that are being drawn."""

import re
import threading
from collections.abc import Mapping

import pytest
from PIL import Image

from carpool.cli.bars import MOST_PREVIEWS, MOST_SHOWN, PREVIEW_WIDTH, Previews, bars
from carpool.cli.show import protocol_of


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "dumb", "COLUMNS": "100", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("wide")
def test_each_picture_has_its_bar_and_one_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    with bars(["a red circle", "a blue square [bold]"], are_shown=True) as move:
        move(0, 1)
        move(1, 0.5)

    written = capsys.readouterr().err
    assert "1 of 2 done" in written
    assert "a red circle" in written
    assert "a blue square [bold]" in written  # prompts are no markup


@pytest.mark.usefixtures("wide")
def test_of_many_pictures_only_those_that_are_drawn_have_bars(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [f"picture {i:02}" for i in range(MOST_SHOWN + 20)]

    with bars(names, are_shown=True) as move:
        threads = [threading.Thread(target=move, args=[i, 1]) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        move(7, 0.5)

    written = capsys.readouterr().err
    assert "5 of 32 done" in written
    assert set(re.findall("picture ([0-9]+)", written)) == {"07"}


def test_without_a_terminal_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with bars(["a"]) as move:
        move(0, 1)

    assert capsys.readouterr().err == ""


def test_previews_are_below_the_bars_until_their_pictures_are_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # a terminal of no abilities is written to once, in the end
    for name, value in {"TERM": "dumb", "COLUMNS": "200", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    previews, picture = Previews(), Image.new("RGB", (PREVIEW_WIDTH, 8), "red")
    with bars([str(i) for i in range(8)], previews, are_shown=True) as move:
        for place in range(6):
            previews[place] = picture
        move(0, 1)
        move(1, 1)
        move(2, 0.5)
    assert capsys.readouterr().err.count("\u2580") == 4 * PREVIEW_WIDTH * (8 // 2)

    assert MOST_PREVIEWS == 4
    assert len(previews.table(2 * PREVIEW_WIDTH + 2).columns) == 2  # as many as have room
    assert len(previews.table(10).columns) == 1


# `carpool generate --show`: which of the protocols a terminal understands


@pytest.mark.parametrize(
    ("terminal", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, "iterm2"),  # over ssh
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "iterm2"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "vscode"}, "blocks"),
        ({"TERM": "screen-256color", "KITTY_WINDOW_ID": "1"}, "blocks"),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/t,1,0"}, "blocks"),
        ({}, "blocks"),
    ],
)
def test_a_terminal_is_known_by_its_own_variables(
    terminal: Mapping[str, str], protocol: str
) -> None:
    assert protocol_of(terminal) == protocol
