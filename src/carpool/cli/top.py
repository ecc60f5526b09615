"""`carpool top`: live view of a running server in a terminal, from `GET /v1/events`."""

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from carpool.cli.jobs import NoAnswer, ServerClient, connection_options

if TYPE_CHECKING:
    from rich.console import RenderableType

SECONDS = 5.0  # window of the means of forwards
MOST_LINES = 20  # most lines of requests
BAR = 24  # characters
REASONS = {
    "nobody": "no other call was waiting",
    "cap": "as wide as is allowed",
    "knee": "wider would not be faster",
    "untried": "wider has not been tried yet",
    "group": "wider would delay the requests of the batch",
    "split": "a wider one failed and was cut in two",
    "failed": "the choice of calls failed: see the log",
}

WorkerPlace = tuple[str, int]
"""Model and number of a worker."""


class Dashboard:
    """The state of a server from its last events, drawn for a terminal."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self._stats: dict[WorkerPlace, dict[str, Any]] = {}
        self._activities: dict[WorkerPlace, dict[str, Any]] = {}
        self._forwards: dict[WorkerPlace, deque[dict[str, Any]]] = {}
        self._since_s: dict[WorkerPlace, float] = {}  # start of the first reported forward

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """Add one event."""
        worker = data.get("model", ""), data.get("worker", 0)
        if kind == "status":
            self.status = data
        elif kind == "stats":
            self._stats[worker] = data
        elif kind == "activity":
            forwards = self._forwards.setdefault(worker, deque())
            if data["now_s"] < self._activities.get(worker, data)["now_s"]:
                forwards.clear()  # a new process has a new clock
                self._since_s.pop(worker, None)
            self._activities[worker] = data
            forwards.extend(data["forwards"])
            if forwards:
                self._since_s.setdefault(worker, forwards[0]["began_s"])
            while forwards and forwards[0]["began_s"] < data["now_s"] - SECONDS:
                forwards.popleft()

    @property
    def is_whole(self) -> bool:
        """Return whether an event of each kind has arrived."""
        return bool(self.status and self._stats and self._activities)

    def _of(self, name: str) -> list[dict[str, Any]]:
        """The running or the waiting requests of all workers."""
        return [request for activity in self._activities.values() for request in activity[name]]

    @property
    def waiting_count(self) -> int:
        """Requests that wait at workers and, with several workers, at the front."""
        waiting = {model: worker.get("held", 0) for (model, _), worker in self._stats.items()}
        in_workers = sum(activity["waiting_count"] for activity in self._activities.values())
        return int(sum(waiting.values()) + in_workers)

    def means(self) -> tuple[float, float, float]:
        """Recent forwards a second (of steps and tokens), and requests and rows a forward."""
        pace, requests, rows, count = 0.0, 0, 0, 0
        for worker, forwards in self._forwards.items():
            runs = [f for f in forwards if "denoise" in f["phase"] or ".generate" in f["module"]]
            watched_s = self._activities[worker]["now_s"] - self._since_s.get(worker, 0.0)
            pace += len(runs) / max(0.001, min(SECONDS, watched_s))
            requests += sum(len(run["requests"]) for run in runs)
            rows += sum(run["rows"] for run in runs)
            count += len(runs)
        return pace, requests / max(1, count), rows / max(1, count)

    def render(self) -> "RenderableType":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        status, running, waiting = self.status, self._of("running"), self._of("waiting")
        pace, requests, rows = self.means()
        state = str(status.get("status", "connecting"))
        worker_count = f"{len(self._stats)} workers   " if len(self._stats) > 1 else ""
        head = Text.assemble(
            (f"{status.get('model', '')} ", "bold"),
            (state, "green" if state == "ready" else "red"),
            f"   {worker_count}running {len(running)}   waiting {self.waiting_count}",
        )
        stats = self._stats.values()
        uses = [worker.get("memory", {}) for worker in stats]
        gib = sum(use.get("reserved_bytes") or use.get("peak_bytes") or 0 for use in uses) / 2**30
        steps = sum(worker.get("steps_per_s", 0.0) for worker in stats)
        waits = (worker.get("waits", {}).get("median_s", 0.0) for worker in stats)
        numbers = Text(
            f"{steps:.1f} steps/s   {pace:.1f} forwards/s   "
            f"{requests:.1f} requests and {rows:.1f} rows a forward   "
            f"queue {max(waits, default=0.0):.2f} s   {gib:.1f} GiB",
            style="dim",
        )
        table = Table(box=None, pad_edge=False, expand=False)
        for name in ("request", "phase", "steps", "", "left"):
            table.add_column(name, no_wrap=True)
        for entry in running[:MOST_LINES]:
            share = entry["step"] / entry["steps"] if entry["steps"] else 0.0
            bar = "\u2588" * round(share * BAR)
            remaining = "" if entry["left_s"] is None else f"{entry['left_s']:.1f} s of work"
            steps = f"{entry['step']}/{entry['steps']}"
            if entry["phase"] == "encode" and entry.get("tokens"):
                steps = f"{entry['tokens']} tokens"
            table.add_row(_name(entry), entry["phase"], steps, f"{bar:\u2591<{BAR}}", remaining)
        for entry in waiting[: max(0, MOST_LINES - len(running))]:
            starts = "" if entry["starts_s"] is None else f"starts in {entry['starts_s']:.1f} s"
            table.add_row(_name(entry), "waiting", "", "", starts, style="dim")
        if len(running) > MOST_LINES:
            table.add_row(f"and {len(running) - MOST_LINES} more", style="dim")
        last = Text()
        if last_forwards := [forwards[-1] for forwards in self._forwards.values() if forwards]:
            entry = last_forwards[-1]
            last.append(
                f"last forward: {entry['module']}, {len(entry['requests'])} requests, "
                f"{entry['rows']} rows, {1000 * entry['duration_s']:.1f} ms; not wider: "
                f"{_reason(entry['why'])}",
                style="dim",
            )
        return Group(head, numbers, Text(), table, Text(), last)


def _name(request: dict[str, Any]) -> str:
    return str(request.get("id", f"another client's, no. {request['number']}"))


def _reason(why: str) -> str:
    if why.startswith("differs:"):
        return f"the others differ in {why.removeprefix('differs:')}"
    return REASONS.get(why, why or "?")


@click.command()
@connection_options
@click.option("--once", is_flag=True, help="show the state once; default without a terminal")
def top(url: str, api_key: str | None, once: bool) -> None:
    """Watch a running server: requests, queue, forwards, throughput.

    Requests of other API keys appear only as numbers. CARPOOL_API_KEY replaces --api-key.
    """
    from rich.console import Console
    from rich.live import Live

    console, board = Console(), Dashboard()
    with closing(ServerClient(url, api_key)) as server:
        if once or not sys.stdout.isatty():
            _follow(server, board, lambda: board.is_whole)
            console.print(board.render())
            return
        with Live(board.render(), console=console, screen=True, auto_refresh=False) as live:

            def show() -> bool:
                live.update(board.render(), refresh=True)
                return False

            while True:
                _follow(server, board, show)  # returns when the server ends
                board.status = {"status": "not reachable"}
                show()
                time.sleep(1)


def _follow(server: ServerClient, board: Dashboard, after: Callable[[], bool]) -> None:
    """Feed events to the dashboard until `after` returns true, or the stream ends."""
    try:
        for kind, data in server.events():
            board.take(kind, data)
            if after():
                return
    except NoAnswer:
        if not board.status:  # otherwise it answered before: wait for its return
            raise
