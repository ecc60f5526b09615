"""What clients saw of a server while things broke, and what of it must not be.

Nothing here speaks to a server: clients write, `problems` reads when all is over.
"""

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proof.history import Seen
from proof.history import problems as problems_of_jobs
from proof.tickets import Ticket, Verdict

EXPECTED = ("out_of_memory", "store_failed")
"""Failures that a client may be told of: its call ran out of memory alone, too; its files were to
be written while the disk was full."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How it ended for one request."""

    kind: str  # of client
    ticket: Ticket
    files: Sequence[bytes] = ()  # the pictures it got
    failure: str = ""  # the code that it was told; nothing: it got its picture
    took_s: float = 0.0  # all tries together


@dataclass(slots=True)
class Diary:
    """Everything that was seen."""

    endings: list[Ending] = field(default_factory=list)
    jobs: list[Seen] = field(default_factory=list)
    again: Counter[tuple[str, str]] = field(default_factory=Counter)  # client, why it asked again
    gone: int = 0  # clients that disconnected

    def verdicts(self, tickets: Sequence[Ticket]) -> Counter[tuple[str, Verdict]]:
        """What is to be said of all pictures, by kind of client."""
        verdicts: dict[tuple[str, bytes], Verdict] = {}  # most are the same bytes again
        counts: Counter[tuple[str, Verdict]] = Counter()
        for ending in self.endings:
            for file in ending.files:
                key = ending.ticket.prompt, file
                if key not in verdicts:
                    verdicts[key] = ending.ticket.verdict(file, tickets)
                counts[ending.kind, verdicts[key]] += 1
        return counts


@dataclass(frozen=True, slots=True)
class Findings:
    """What must be nothing."""

    lost: list[str]
    duplicated: list[str]
    foreign: int
    spoiled: int

    @property
    def are_none(self) -> bool:
        return not (self.lost or self.duplicated or self.foreign or self.spoiled)


def findings(diary: Diary, tickets: Sequence[Ticket]) -> Findings:
    """Read the diary when everything has ended.

    Lost is a request without its picture that was not told of a failure in `TOLD`, duplicated one
    with more than one picture, and whatever the checker of jobs finds.
    """
    losses = [
        f"{ending.kind}: {ending.failure or 'no picture'}"
        for ending in diary.endings
        if not ending.files and ending.failure not in EXPECTED
    ]
    duplicated = [f"{e.kind}: {len(e.files)}" for e in diary.endings if len(e.files) > 1]
    for problem in problems_of_jobs(diary.jobs):
        (losses if "is lost" in problem else duplicated).append(problem)
    verdicts = Counter[Verdict]()
    for (_, verdict), count in diary.verdicts(tickets).items():
        verdicts[verdict] += count
    return Findings(losses, duplicated, verdicts["foreign"], verdicts["spoiled"])


def file_of(data: dict[str, Any]) -> bytes:
    """The picture inside of an answer's JSON."""
    return base64.b64decode(data["b64_json"])
