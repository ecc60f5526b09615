"""`carpool top`: what a running server does, live in a terminal, from `GET /v1/events`."""

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.jobs import URL, server_client
from carpool.errors import CarpoolError

if TYPE_CHECKING:
    from rich.console import RenderableType

SECONDS = 5.0  # over which forwards are averaged
MOST_LINES = 20  # requests
BAR = 24  # characters
REASONS = {
    "nobody": "no other call was waiting",
    "cap": "as wide as is allowed",
    "knee": "wider would not be faster",
    "untried": "wider has not been tried yet",
    "group": "others would slow down those who began together",
    "split": "a wider one failed and was cut in two",
}


class Board:
    """What the last events said, as a picture for a terminal."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.activity: dict[str, Any] = {}
        self._forwards: deque[dict[str, Any]] = deque()
        self._now_s = 0.0

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """One event."""
        if kind == "status":
            self.status = data
        elif kind == "stats":
            self.stats = data
        elif kind == "activity":
            if data["now_s"] < self._now_s:
                self._forwards.clear()  # another worker's clock
            self.activity, self._now_s = data, data["now_s"]
            self._forwards.extend(data["forwards"])
            while self._forwards and self._forwards[0]["began_s"] < self._now_s - SECONDS:
                self._forwards.popleft()

    @property
    def is_whole(self) -> bool:
        """Has there been an event of each kind?"""
        return bool(self.status and self.stats and self.activity)

    def means(self) -> tuple[float, float, float]:
        """Denoising forwards a second, requests and rows a forward, over the last seconds."""
        found = [one for one in self._forwards if one["phase"] == "denoise"]
        if not found:
            return 0.0, 0.0, 0.0
        requests = sum(len(one["requests"]) for one in found) / len(found)
        return len(found) / SECONDS, requests, sum(one["rows"] for one in found) / len(found)

    def render(self) -> "RenderableType":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        said, running = self.status, self.activity.get("running", [])
        pace, requests, rows = self.means()
        state = str(said.get("status", "connecting"))
        head = Text.assemble(
            (f"{said.get('model', '')} ", "bold"),
            (state, "green" if state == "ready" else "red"),
            f"   running {len(running)}   waiting {self.activity.get('waiting_count', 0)}",
        )
        memory = self.stats.get("memory", {})
        held = memory.get("reserved_bytes") or memory.get("peak_bytes") or 0
        waits = self.stats.get("waits", {})
        numbers = Text(
            f"{self.stats.get('steps_per_s', 0.0):.1f} steps/s   {pace:.1f} forwards/s   "
            f"{requests:.1f} requests and {rows:.1f} rows a forward   "
            f"queue {waits.get('median_s', 0.0):.2f} s   {held / 2**30:.1f} GiB",
            style="dim",
        )
        table = Table(box=None, pad_edge=False, expand=False)
        for name in ("request", "phase", "steps", "", "left"):
            table.add_column(name, no_wrap=True)
        for one in running[:MOST_LINES]:
            share = one["step"] / one["steps"] if one["steps"] else 0.0
            bar = "\u2588" * round(share * BAR)
            left = "" if one["left_s"] is None else f"{one['left_s']:.1f} s of work"
            steps = f"{one['step']}/{one['steps']}"
            table.add_row(_name(one), one["phase"], steps, f"{bar:\u2591<{BAR}}", left)
        for one in self.activity.get("waiting", [])[: max(0, MOST_LINES - len(running))]:
            starts = "" if one["starts_s"] is None else f"starts in {one['starts_s']:.1f} s"
            table.add_row(_name(one), "waiting", "", "", starts, style="dim")
        if len(running) > MOST_LINES:
            table.add_row(f"and {len(running) - MOST_LINES} more", style="dim")
        last = Text()
        if self._forwards:
            one = self._forwards[-1]
            last.append(
                f"last forward: {one['module']}, {len(one['requests'])} requests, "
                f"{one['rows']} rows, {1000 * one['duration_s']:.1f} ms; not wider: "
                f"{_reason(one['why'])}",
                style="dim",
            )
        return Group(head, numbers, Text(), table, Text(), last)


def _name(one: dict[str, Any]) -> str:
    return str(one.get("id", f"another client's, no. {one['number']}"))


def _reason(why: str) -> str:
    if why.startswith("differs:"):
        return f"the others differ in {why.removeprefix('differs:')}"
    return REASONS.get(why, why or "?")


def events(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events of lines of text."""
    kind = ""
    for line in lines:
        if line.startswith("event:"):
            kind = line.removeprefix("event:").strip()
        elif line.startswith("data:"):
            yield kind, json.loads(line.removeprefix("data:"))


@click.command()
@click.option("--url", default=URL, show_default=True, help="of the server")
@click.option("--api-key", envvar="CARPOOL_API_KEY", help="bearer token to send")
@click.option("--once", is_flag=True, help="show the present state and end; so without a terminal")
def top(url: str, api_key: str | None, once: bool) -> None:
    """Watch a running server: requests, queue, forwards, throughput.

    Requests of other API keys have numbers only. CARPOOL_API_KEY stands for --api-key.
    """
    from rich.console import Console
    from rich.live import Live

    console, board = Console(), Board()
    if once or not sys.stdout.isatty():
        _follow(url, api_key, board, lambda: board.is_whole)
        console.print(board.render())
        return
    with Live(board.render(), console=console, screen=True, auto_refresh=False) as live:

        def show() -> bool:
            live.update(board.render(), refresh=True)
            return False

        while True:
            _follow(url, api_key, board, show)  # returns when the server ends
            board.status = {"status": "not reachable"}
            show()
            time.sleep(1)


def _follow(url: str, api_key: str | None, board: Board, after: Any) -> None:
    """Feed events to the board until `after` says so, or the stream ends."""
    with server_client(url, api_key) as http:
        from httpx2 import HTTPError

        try:
            with http.stream("GET", "v1/events", timeout=60) as answer:
                if not answer.is_success:
                    answer.read()
                    raise CarpoolError(_told(answer.json(), answer.status_code))
                for kind, data in events(answer.iter_lines()):
                    board.take(kind, data)
                    if after():
                        return
        except HTTPError as error:
            if board.status:
                return  # it was there: it is waited for
            told = f"no answer from {url}: {error}"
            raise CarpoolError(f"{told}; is `carpool serve` running there?") from None


def _told(body: Any, status: int) -> str:
    match body:
        case {"error": {"message": message}}:
            return str(message)
    return f"the server answers {status}"
