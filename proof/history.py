"""Clients' observations of jobs, and the invariants that hold under kills of any process.

A test records every submit, acknowledgement, poll, result and removal in order; `problems` replays
them and reports lost, duplicated and resurrected jobs. At the end every acknowledged job must have
been polled once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ENDS = ("completed", "failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class Seen:
    """One observation of a client."""

    what: Literal["submit", "ack", "poll", "missing", "result", "removed"]
    job: str = ""  # the server's id; empty for a submit
    request: str = ""  # the client's name of a submit and its acknowledgement
    state: str = ""  # state in a poll
    progress: int = 0  # percent in a poll
    digest: str = ""  # digest of a result


@dataclass(slots=True)
class _Job:
    state: str = "queued"
    progress: int = 0
    digest: str = ""
    is_removed: bool = False
    is_acknowledged: bool = False


def problems(events: Sequence[Seen]) -> list[str]:
    """Replay the observations; returns a line for each violation."""
    errors: list[str] = []
    jobs: dict[str, _Job] = {}
    job_ids: dict[str, str] = {}  # job by request
    requests: set[str] = set()
    for event in events:
        if event.what == "submit":
            requests.add(event.request)
            continue
        job = jobs.setdefault(event.job, _Job())
        if job.is_removed and event.what != "missing":
            errors.append(f"{event.job} is resurrected: removed, and seen again by a {event.what}")
        match event.what:
            case "ack":
                _acknowledge(event, requests, job_ids, errors)
                job.is_acknowledged = True
            case "poll":
                _poll(event, job, errors)
            case "missing" if not job.is_removed:
                errors.append(f"{event.job} is lost: not found")
            case "result":
                if job.state != "completed":
                    errors.append(f"{event.job} has a result while it is {job.state}")
                if job.digest not in ("", event.digest):
                    errors.append(f"{event.job} has two results")
                job.digest = event.digest
            case "removed":
                job.is_removed = True
    errors += [
        f"{name} is lost: still {job.state} in the end"
        for name, job in jobs.items()
        if job.is_acknowledged and not job.is_removed and job.state not in ENDS
    ]
    strangers = [name for name, job in jobs.items() if not job.is_acknowledged]
    if len(strangers) > len(requests - job_ids.keys()):  # acknowledgements may be lost
        errors.append(f"more jobs than requests: {', '.join(strangers)}")
    return errors


def _acknowledge(event: Seen, senders: set[str], ids: dict[str, str], errors: list[str]) -> None:
    if event.request not in senders:
        errors.append(f"{event.job} is acknowledged to {event.request}, which sent no submit")
    if ids.get(event.request, event.job) != event.job:
        errors.append(f"{event.request} is duplicated: {ids[event.request]} and {event.job}")
    if any(job == event.job and request != event.request for request, job in ids.items()):
        errors.append(f"{event.job} was given to two requests")
    ids[event.request] = event.job


def _poll(event: Seen, job: _Job, errors: list[str]) -> None:
    if job.state in ENDS and event.state != job.state:
        errors.append(f"{event.job} is resurrected: {job.state}, then {event.state}")
    if event.progress < job.progress:
        errors.append(f"{event.job} falls back from {job.progress} % to {event.progress} %")
    job.state = job.state if job.state in ENDS else event.state
    job.progress = max(job.progress, event.progress)
