"""The results of a run of `chaos`: its section of the page, and broken promises."""

import statistics
from collections import Counter
from dataclasses import dataclass

from carpool.worker.watchdog import LOADING_TIMEOUTS
from proof.diary import Diary, Findings, findings
from proof.page import machine, table
from proof.tickets import Ticket

WORKER_TIMEOUT_S = 5.0
READY_AGAIN_S = 5.0  # promised recovery time, without loading
LOADING_S = (0.2, 3.0)  # time of a kill during loading, after the worker's start
LOST_S = 3.0  # promised reaction to a lost node; Ray notices after 15 s
OUT_OF_MEMORY = 0.002  # fraction of the forwards
FULL_S = 4.0  # duration of a full disk
STOPPED_IN_LOAD = "worker stopped while one loads"


@dataclass(frozen=True, slots=True)
class Struck:
    """One fault, and the downtime of the server."""

    what: str
    away_s: float  # from the fault to readiness
    loading_s: float  # part of it after the start of the new worker or fork server

    @property
    def beyond_s(self) -> float:
        return self.away_s - self.loading_s


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a run."""

    minutes: float
    seed: int
    struck: list[Struck]
    diary: Diary
    tickets: list[Ticket]
    left_over: list[str]  # remains in the server at the end
    disk: str
    workers: int = 1
    steps_again: int = 0
    on_ray: bool = False

    @property
    def findings(self) -> Findings:
        return findings(self.diary, self.tickets)


def page(run: Run) -> str:
    """The section of the page."""
    findings, why = run.findings, Counter[str]()
    for (_, reason), count in run.diary.again.items():
        why[reason] += count
    reasons = ", ".join(f"{count} {reason}" for reason, count in why.most_common())
    flags = f" --workers {run.workers}" if run.workers > 1 else ""
    flags += " --ray" if run.on_ray else ""
    return f"""Made by `python -m proof.chaos --minutes {run.minutes:g} \
--seed {run.seed}{flags}`.
Machine: {machine()}. The disk is {run.disk}.

Lost: **{len(findings.lost)}**. Duplicated: **{len(findings.duplicated)}**. Another request's \
picture: **{findings.foreign}**; changed picture: **{findings.spoiled}**. Left over in the \
server: **{len(run.left_over)}**.

{_endings(run)}

{run.diary.gone} clients disconnected. The others retried because of: {reasons or "nothing"}.

{_faults(run)}

{_again(run)}

Every {round(1 / OUT_OF_MEMORY)}th forward runs out of memory.
"""


def _again(run: Run) -> str:
    """Repeated steps for each death."""
    deaths = sum("killed" in fault.what or "stopped" in fault.what for fault in run.struck)
    average = run.steps_again / deaths if deaths else 0.0
    return f"Repeated steps: {run.steps_again}, {average:.1f} for each of {deaths} deaths."


def _endings(run: Run) -> str:
    heads = ["client", "requests", "right pictures", "failed", "retried"]
    rows, verdicts = [], run.diary.verdicts(run.tickets)
    for kind in dict.fromkeys(ending.kind for ending in run.diary.endings):
        if endings := [ending for ending in run.diary.endings if ending.kind == kind]:
            codes = Counter(ending.failure for ending in endings if ending.failure)
            failures = ", ".join(f"{count} {code}" for code, count in codes.most_common())
            tries = sum(count for (name, _), count in run.diary.again.items() if name == kind)
            slow = f"{max(ending.took_s for ending in endings):.1f}"
            rows.append([kind, len(endings), verdicts[kind, "right"], failures or "0", tries, slow])
    return table([*heads, "longest (s)"], rows)


def _faults(run: Run) -> str:
    heads = ["fault", "times", "away, median (s)", "away, most (s)", "of that loading, most (s)"]
    rows = []
    for fault_name in dict.fromkeys(fault.what for fault in run.struck):
        faults = [fault for fault in run.struck if fault.what == fault_name]
        away, loading = [fault.away_s for fault in faults], [fault.loading_s for fault in faults]
        beyond = max(fault.beyond_s for fault in faults)
        numbers = [statistics.median(away), max(away), max(loading), beyond]
        rows.append([fault_name, len(faults), *(f"{number:.1f}" for number in numbers)])
    return table([*heads, "beyond loading, most (s)"], rows)


def problems(run: Run) -> list[str]:
    """Broken promises."""
    findings = run.findings
    late = [
        f"{fault.what}: ready after {fault.beyond_s:.1f} s beyond loading"
        for fault in run.struck
        if fault.beyond_s - _allowed_s(fault.what) > READY_AGAIN_S
    ]
    wrong = [] if findings.are_none else [f"{findings.foreign} foreign, {findings.spoiled} spoiled"]
    return [*findings.lost, *findings.duplicated, *late, *run.left_over, *wrong]


def _allowed_s(fault: str) -> float:
    """Time of the fault itself: until its detection, or its second part."""
    if "node" in fault or "cut off" in fault:
        return LOST_S
    if "disk full" in fault:
        return FULL_S
    if fault == STOPPED_IN_LOAD:
        return LOADING_TIMEOUTS * WORKER_TIMEOUT_S
    if "stopped" in fault:
        return WORKER_TIMEOUT_S
    return LOADING_S[1] if "as it loads" in fault else 0.0
