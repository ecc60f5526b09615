"""Pictures in the terminal: in kitty's or iTerm2's protocol, otherwise as coloured half blocks.

The terminal's environment variables identify it: a query by escape sequence would need an answer on
standard input, which may hold prompts. In tmux and screen, which do not forward pictures by
default, pictures are half blocks.

Source: https://sw.kovidgoyal.net/kitty/graphics-protocol, https://iterm2.com/documentation-images.html
"""

import base64
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from PIL import Image
    from rich.segment import Segments

Protocol = Literal["kitty", "iterm2", "blocks"]
WIDTH = 48  # most columns
CHUNK = 4096  # base64 characters in each of kitty's commands

_KITTY = {"kitty", "ghostty"}
_ITERM2 = {"iTerm.app", "iTerm2", "WezTerm"}


def protocol_of(environ: Mapping[str, str]) -> Protocol:
    """The picture protocol of a terminal, from its environment variables."""
    if environ.get("TMUX") or environ.get("TERM", "").startswith(("screen", "tmux")):
        return "blocks"
    names = {environ.get("TERM_PROGRAM", ""), environ.get("LC_TERMINAL", "")}
    is_kitty = "KITTY_WINDOW_ID" in environ or names & _KITTY
    if is_kitty or environ.get("TERM") in ("xterm-kitty", "xterm-ghostty"):
        return "kitty"
    return "iterm2" if names & _ITERM2 else "blocks"


def why_not(environ: Mapping[str, str]) -> str | None:
    """The reason why pictures cannot be shown; None if they can."""
    if not sys.stdout.isatty():
        return "standard output is not a terminal"
    if environ.get("TERM", "dumb") == "dumb":
        return "TERM says that this terminal cannot show colours"
    return None


def show(picture: "Image.Image", protocol: Protocol) -> None:
    """Write a picture to standard output, at most `WIDTH` columns wide."""
    if protocol == "blocks":
        from rich.console import Console

        console = Console()
        for line in blocks(picture, min(WIDTH, console.width)):
            console.print(line, end="")
        return
    from carpool.media import encode_image

    # iTerm2 and kitty scale it; a cell is about twice as tall as wide
    columns = min(WIDTH, max(8, picture.width // 8))
    file = encode_image(picture, "png", 100, None)
    png = base64.b64encode(file).decode()
    options = f"inline=1;size={len(file)};width={columns};preserveAspectRatio=1"
    iterm2 = f"\033]1337;File={options}:{png}\a"
    sys.stdout.write("".join(_kitty(png, columns)) if protocol == "kitty" else iterm2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _kitty(png: str, columns: int) -> Iterator[str]:
    """Transmit and display (a=T) a PNG (f=100) without answers (q=2), in chunks."""
    for at in range(0, len(png), CHUNK):
        first = f"a=T,f=100,q=2,c={columns}," if at == 0 else ""
        has_more = int(at + CHUNK < len(png))
        yield f"\033_G{first}m={has_more};{png[at : at + CHUNK]}\033\\"


def blocks(picture: "Image.Image", columns: int) -> Iterator["Segments"]:
    """Lines of upper half blocks: foreground is a row of pixels, background the next row."""
    from rich.color import Color
    from rich.segment import Segment, Segments
    from rich.style import Style

    columns = min(columns, picture.width)
    rows = max(1, round(columns * picture.height / picture.width / 2))
    values = picture.convert("RGB").resize((columns, 2 * rows)).tobytes()

    def colour(x: int, y: int) -> Color:
        at = 3 * (y * columns + x)
        return Color.from_rgb(*values[at : at + 3])

    for y in range(0, 2 * rows, 2):
        cells = [
            Segment("\N{UPPER HALF BLOCK}", Style(color=colour(x, y), bgcolor=colour(x, y + 1)))
            for x in range(columns)
        ]
        yield Segments([*cells, Segment.line()])
