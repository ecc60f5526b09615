"""The checker of histories passes what is right and finds each wrong that it is there for."""

import pytest

from proof.history import Seen, problems

ASKED = [Seen("submit", request="a"), Seen("ack", "1", request="a")]
ENDED = [*ASKED, Seen("poll", "1", state="completed", progress=100)]


@pytest.mark.parametrize(
    "seen",
    [
        [],
        ENDED,
        [*ASKED, Seen("poll", "1", state="in_progress", progress=50),
         Seen("poll", "1", state="queued", progress=50),
         Seen("poll", "1", state="completed", progress=100), Seen("result", "1", digest="x"),
         Seen("result", "1", digest="x"), Seen("removed", "1"), Seen("missing", "1")],
        [Seen("submit", request="a"), Seen("poll", "1", state="failed")],  # its answer was lost
        [*ASKED, *ASKED, Seen("poll", "1", state="cancelled")],  # asked twice, one job
    ],
    ids=["nothing", "ended", "run twice and removed", "not acknowledged", "the same key"],
)  # fmt: skip
def test_a_right_history_passes(seen: list[Seen]) -> None:
    assert problems(seen) == []


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (ASKED, "1 is lost: still queued in the end"),
        ([*ENDED, Seen("missing", "1")], "1 is lost: not found"),
        ([*ENDED, Seen("poll", "1", state="queued", progress=100)],
         "1 is resurrected: completed, then queued"),
        ([*ENDED, Seen("removed", "1"), Seen("poll", "1", state="completed", progress=100)],
         "1 is resurrected: removed, and seen again by a poll"),
        ([*ENDED, Seen("submit", request="a"), Seen("ack", "2", request="a"),
          Seen("poll", "2", state="completed")], "a is duplicated: 1 and 2"),
        ([*ENDED, Seen("submit", request="b"), Seen("ack", "1", request="b")],
         "1 was given to two requests"),
        ([*ENDED, Seen("ack", "2", request="b"), Seen("poll", "2", state="failed")],
         "2 is acknowledged to b, which sent no submit"),
        ([*ENDED, Seen("result", "1", digest="x"), Seen("result", "1", digest="y")],
         "1 has two results"),
        ([*ASKED, Seen("result", "1"), Seen("poll", "1", state="failed")],
         "1 has a result while it is queued"),
        ([*ASKED, Seen("poll", "1", state="in_progress", progress=9),
          Seen("poll", "1", state="completed", progress=8)], "1 falls back from 9 % to 8 %"),
        ([*ENDED, Seen("poll", "2", state="completed")], "more jobs than requests: 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_wrong_history_is_named(seen: list[Seen], problem: str) -> None:
    assert problems(seen) == [problem]
