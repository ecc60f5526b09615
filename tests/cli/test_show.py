"""`carpool generate --show`: which of the protocols a terminal understands."""

from collections.abc import Mapping

import pytest

from carpool.cli.show import protocol_of


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
