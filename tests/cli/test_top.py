"""`carpool top`: the same live data as the playground's, in a terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from carpool.cli.jobs import events
from carpool.cli.top import Dashboard


def forward(*requests: int, at_s: float, why: str = "cap") -> dict[str, Any]:
    said = {"module": "transformer.forward", "phase": "denoise", "began_s": at_s}
    return said | {"duration_s": 0.01, "rows": len(requests), "requests": [*requests], "why": why}


def shown(board: Dashboard) -> str:
    written = io.StringIO()
    Console(file=written, width=120).print(board.render())
    return written.getvalue()


def test_requests_have_their_steps_and_strangers_have_numbers() -> None:
    board = Dashboard()
    mine = {"number": 1, "phase": "denoise", "step": 7, "steps": 28, "left_s": 1.25, "id": "job-1"}
    theirs = {"number": 2, "phase": "encode", "step": 0, "steps": 0, "left_s": None}
    writes = {**theirs, "number": 4, "tokens": 12}
    later = {"number": 3, "waited_s": 1.0, "starts_s": 2.5}

    board.take("status", {"status": "ready", "model": "shapes"})
    board.take("activity", {"now_s": 10.0, "running": [mine, theirs, writes], "waiting": [later],
                            "waiting_count": 1,
                            "forwards": [forward(1, 2, at_s=9.0, why="differs:size")]})  # fmt: skip
    text = shown(board)

    assert "shapes ready   running 3   waiting 1" in text
    assert "job-1" in text
    assert "7/28" in text
    assert "12 tokens" in text
    assert "another client's, no. 2" in text
    assert "starts in 2.5 s" in text
    assert "not wider: the others differ in size" in text


def test_means_are_those_of_the_last_seconds_and_of_one_worker() -> None:
    board, common = Dashboard(), {"running": [], "waiting": [], "waiting_count": 0}

    board.take("activity", {"now_s": 10.0, "forwards": [forward(1, at_s=4.0)], **common})
    board.take("activity", {"now_s": 10.5, "forwards": [forward(1, 2, at_s=10.0)], **common})
    assert board.means() == (0.2, 2.0, 2.0)

    board.take("activity", {"now_s": 1.0, "forwards": [forward(5, at_s=0.5)], **common})
    assert board.means() == (2.0, 1.0, 1.0)  # of half a second that was watched


def test_workers_are_added_up_and_each_has_its_own_clock() -> None:
    board, one = Dashboard(), {"phase": "denoise", "step": 1, "steps": 4, "left_s": None}
    board.take("status", {"status": "ready", "model": "shapes"})
    for worker, now_s in ((0, 1000.0), (1, 3.0), (0, 1000.2)):
        seen = [forward(1, 2, at_s=now_s - 0.1)]
        board.take("activity", {"model": "shapes", "worker": worker, "now_s": now_s,
                                "running": [one | {"number": 1}], "waiting": [],
                                "waiting_count": 2, "forwards": seen})  # fmt: skip
        memory, waits = {"peak_bytes": 2**30}, {"median_s": 0.5}
        board.take("stats", {"model": "shapes", "worker": worker, "held": 3, "steps_per_s": 5.0,
                             "memory": memory, "waits": waits})  # fmt: skip

    assert board.means() == pytest.approx((2 / 0.3 + 1 / 0.1, 2.0, 2.0))
    assert "shapes ready   2 workers   running 2   waiting 7" in shown(board)
    assert "10.0 steps/s" in shown(board)
    assert "2.0 GiB" in shown(board)


def test_events_are_read_from_lines_and_comments_are_none() -> None:
    lines = ["event: status", 'data: {"a": 1}', "", ": ping", "", "event: stats", "data: {}"]

    assert list(events(lines)) == [("status", {"a": 1}), ("stats", {})]
