"""Observations of clients during faults, and the forbidden ones.

This module does not talk to a server: clients write, and `findings` reads at the end.
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
"""Allowed failures: a call ran out of memory even alone, or files were due while the disk was
full."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The result of one request."""

    kind: str  # kind of client
    ticket: Ticket
    files: Sequence[bytes] = ()  # received pictures
    failure: str = ""  # error code; "": it got its picture
    took_s: float = 0.0  # total of all tries


@dataclass(slots=True)
class Diary:
    """All observations."""

    endings: list[Ending] = field(default_factory=list)
    jobs: list[Seen] = field(default_factory=list)
    again: Counter[tuple[str, str]] = field(default_factory=Counter)  # retries by client and reason
    gone: int = 0  # clients that disconnected

    def verdicts(self, tickets: Sequence[Ticket]) -> Counter[tuple[str, Verdict]]:
        """Count the verdicts on all pictures, by kind of client."""
        verdicts: dict[tuple[str, bytes], Verdict] = {}  # cache: most pictures are identical
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
    """Violations; all must be empty."""

    lost: list[str]
    duplicated: list[str]
    foreign: int
    spoiled: int

    @property
    def are_none(self) -> bool:
        return not (self.lost or self.duplicated or self.foreign or self.spoiled)


def findings(diary: Diary, tickets: Sequence[Ticket]) -> Findings:
    """Evaluate the diary at the end.

    Lost: a request without its picture and without a failure in `TOLD`. Duplicated: a request with
    more than one picture. The checker of jobs adds further violations.
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
    """The picture in an answer's JSON."""
    return base64.b64decode(data["b64_json"])
