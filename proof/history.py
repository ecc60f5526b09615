"""What clients saw of jobs, and what must hold of it, whoever was killed in between.

A test records every submit, acknowledgement, poll, result and removal in the order in which they
happened; `problems` replays them and names what was lost, duplicated or resurrected. In the end
every acknowledged job must have been polled once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ENDS = ("completed", "failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class Seen:
    """One thing that a client saw."""

    what: Literal["submit", "ack", "poll", "missing", "result", "removed"]
    job: str = ""  # the id that the server gave; nothing for a submit
    request: str = ""  # the client's own name of it: of a submit and its acknowledgement
    state: str = ""  # of a poll
    progress: int = 0  # of a poll, percent
    digest: str = ""  # of a result


@dataclass(slots=True)
class _Job:
    state: str = "queued"
    progress: int = 0
    digest: str = ""
    is_removed: bool = False
    is_acknowledged: bool = False


def problems(seen: Sequence[Seen]) -> list[str]:
    """Replay what was seen; gives a line for everything that must not be."""
    found: list[str] = []
    jobs: dict[str, _Job] = {}
    given: dict[str, str] = {}  # the job of a request
    asked: set[str] = set()
    for one in seen:
        if one.what == "submit":
            asked.add(one.request)
            continue
        job = jobs.setdefault(one.job, _Job())
        if job.is_removed and one.what != "missing":
            found.append(f"{one.job} is resurrected: removed, and seen again by a {one.what}")
        match one.what:
            case "ack":
                _acknowledge(one, asked, given, found)
                job.is_acknowledged = True
            case "poll":
                _poll(one, job, found)
            case "missing" if not job.is_removed:
                found.append(f"{one.job} is lost: not found")
            case "result":
                if job.state != "completed":
                    found.append(f"{one.job} has a result while it is {job.state}")
                if job.digest not in ("", one.digest):
                    found.append(f"{one.job} has two results")
                job.digest = one.digest
            case "removed":
                job.is_removed = True
    found += [
        f"{name} is lost: still {job.state} in the end"
        for name, job in jobs.items()
        if job.is_acknowledged and not job.is_removed and job.state not in ENDS
    ]
    strangers = [name for name, job in jobs.items() if not job.is_acknowledged]
    if len(strangers) > len(asked - given.keys()):  # an acknowledgement may be lost on its way
        found.append(f"nobody asked for all of {', '.join(strangers)}")
    return found


def _acknowledge(one: Seen, asked: set[str], given: dict[str, str], found: list[str]) -> None:
    if one.request not in asked:
        found.append(f"{one.job} is acknowledged to {one.request}, which never asked")
    if given.get(one.request, one.job) != one.job:
        found.append(f"{one.request} is duplicated: {given[one.request]} and {one.job}")
    if any(job == one.job and request != one.request for request, job in given.items()):
        found.append(f"{one.job} was given to two requests")
    given[one.request] = one.job


def _poll(one: Seen, job: _Job, found: list[str]) -> None:
    if job.state in ENDS and one.state != job.state:
        found.append(f"{one.job} is resurrected: {job.state}, then {one.state}")
    if one.progress < job.progress:
        found.append(f"{one.job} falls back from {job.progress} % to {one.progress} %")
    job.state = job.state if job.state in ENDS else one.state
    job.progress = max(job.progress, one.progress)
