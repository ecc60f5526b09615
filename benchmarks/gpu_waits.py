"""Part *waits*: where the host waits for the device, and the device for the host.

- *Synchronisations* reported by CUDA while eight mixed requests run: by line and step.
- *Gaps* between forwards: every forward is between two events. If a forward's end event has passed
  when Python launches the next forward, the device was idle: the next forward is late, without
  reason unless the one before was launch-bound: Python launched its kernels more slowly than they
  ran. *Device ms* and *launch ms*: medians of a forward's time on the device, and of its launch.
  A gap includes the schedulers' kernels.
- *A step*: the fraction of time in which a kernel ran, and the most expensive operations.
"""

import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.forward_log import RunForward, wrapped_forwards
from benchmarks.gpu_build import Built, Rig
from benchmarks.gpu_clock import Marks, Moment, union_s
from benchmarks.gpu_records import Rows
from carpool.engine.intercept import Call

NAMES = ("flux", "sdxl")
COUNT, TOP = 8, 10
BOUND = 0.9  # of its time on the device: a longer launch keeps the device waiting
ENGINE = "carpool/engine"


def measure(rig: Rig, rows: Rows) -> None:
    for name in NAMES:
        title = rig.model(name).title
        parts: dict[str, Callable[[Built], Any]] = {
            "synchronisations": _synchronisations,
            "gaps": _gaps,
            "a step": _step,
        }
        if all(rows.has(f"{title}, {title_of_part}") for title_of_part in parts):
            continue
        with rig.built(name) as subject:
            for title_of_part, work in parts.items():
                rows.measure(f"{title}, {title_of_part}", partial(work, subject), needs_s=10)


def _synchronisations(subject: Built) -> list[dict[str, Any]]:
    table = {"table": "Synchronisations"}
    if subject.rig.device.type != "cuda":
        return [{**table, "line": "not reported by this device"}]
    requests = subject.requests(subject.model.sizes[0], COUNT)
    steps = sum(request.parameters["num_inference_steps"] for request in requests)
    with subject.engine() as engine:
        engine.generate(requests, progress=False)
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.generate(requests, progress=False)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    sites = Counter(f"{r.filename}:{r.lineno}" for r in records if "sync" in str(r.message))
    rows = [
        {**table, "line": site.partition("site-packages/")[2] or site, "times": count,
         "a request-step": count / steps, "ours": "OURS" if ENGINE in site else ""}
        for site, count in sites.most_common(2 * TOP)
    ]  # fmt: skip
    return rows or [{**table, "line": "none"}]


def _gaps(subject: Built) -> dict[str, Any]:
    marks = subject.rig.marks
    watch, requests = Watch(marks), subject.requests(subject.model.sizes[0], COUNT)
    with wrapped_forwards(watch), subject.engine() as engine:
        for _ in range(2):  # the first is a warm-up
            watch.spans.clear()
            engine.generate(requests, progress=False)
            marks.wait()
    gaps, spans = sorted(1e6 * gap for gap in watch.gaps_s()), watch.spans
    device_s = [marks.between(span.begin, span.end) for span in spans]
    is_bound = [s.launch_s > BOUND * took_s for s, took_s in zip(spans, device_s, strict=True)]
    idle = sum(b.is_late for before, b in zip(is_bound, spans[1:], strict=False) if not before)
    return {
        "table": "Gaps between forwards", "forwards": len(spans),
        "rows": statistics.mean(span.rows for span in spans),
        "device ms": 1e3 * statistics.median(device_s),
        "launch ms": 1e3 * statistics.median(span.launch_s for span in spans),
        "launch-bound": f"{statistics.mean(is_bound):.0%}",
        "gap us": statistics.median(gaps), "longest us": gaps[-1],
        "late": f"{statistics.mean(span.is_late for span in spans):.0%}",
        "late without reason": idle,
        "ahead": ("WRONG" if idle else "holds") if marks.is_cuda else "",
    }  # fmt: skip


def _step(subject: Built) -> list[dict[str, Any]]:
    request = subject.request(subject.model.sizes[0], 2)
    is_cuda = subject.rig.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]
    with subject.engine() as engine, tempfile.TemporaryDirectory() as folder:
        engine.generate(request, progress=False)
        with profile(activities=activities) as profiler:
            engine.generate(request, progress=False)
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    durations: Counter[str] = Counter()
    kind = "kernel" if is_cuda else "cpu_op"
    for event in events:
        if event.get("cat") == kind:
            durations[event["name"][:80]] += event["dur"]
    total = sum(durations.values())
    first = {"table": "A request of two steps", "operation": "any kernel", "ms": total / 1e3,
             "share": f"{share_of_kernels(events):.0%} of the time" if is_cuda else ""}  # fmt: skip
    return [first] + [
        {
            "table": first["table"],
            "operation": name,
            "ms": took / 1e3,
            "share": f"{took / total:.0%}",
        }
        for name, took in durations.most_common(TOP)
    ]


@dataclass(frozen=True, slots=True)
class Span:
    """One forward on the device."""

    begin: Moment
    end: Moment
    rows: int
    launch_s: float  # time of Python
    is_late: bool  # the device had no work when it was launched


class Watch:
    """A wrapper of forwards that records when they run."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.spans: list[Span] = []

    def __call__(self, run: RunForward, calls: Sequence[Call], rows: Sequence[int]) -> list[Any]:
        is_late = bool(self.spans) and self._marks.is_past(self.spans[-1].end)
        begin, began_s = self._marks.now(), time.perf_counter()
        answers = run(calls, rows)
        launch_s = time.perf_counter() - began_s
        self.spans.append(Span(begin, self._marks.now(), sum(rows), launch_s, is_late))
        return answers

    def gaps_s(self) -> list[float]:
        """Seconds from the end of each forward to the start of the next; all have finished."""
        pairs = zip(self.spans, self.spans[1:], strict=False)
        return [self._marks.between(before.end, after.begin) for before, after in pairs]


def share_of_kernels(events: Sequence[dict[str, Any]]) -> float:
    """The fraction of the time from first to last kernel in which kernels ran.

    Args:
        events: events of a Chrome trace by torch's profiler.

    Raises:
        ValueError: there are no kernel events.
    """
    spans = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") == "kernel"
    ]
    if not spans:
        raise ValueError("the profiler saw no kernels")
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return union_s(spans) / whole
