"""Requests through the engine: how fast, whether the device ever waited, and whether fusing shows.

*Waited.* Every forward lies between two CUDA events. If the event at the end of a forward has
already happened when Python comes to launch the next one, the device had nothing to do: the
forward came late, and the time from that event to the one before the new forward is counted as
waiting. It holds the few small kernels that run between forwards too (schedulers, stacking), so it
is the most that the device can have waited between forwards. What it waits *within* a forward,
because Python launches kernels one by one, is the model's own code and not the loop: the share of
a short stretch in which any kernel ran, by torch's profiler, has both.
"""

import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import carpool
from benchmarks.gpu_clock import Marks, Moment, union_s
from benchmarks.gpu_report import Likeness, Run
from carpool.engine.intercept import Interception

WIDTHS = (1, 2, 3, 8)  # together, to warm up: compiled code is made for one row and for several


class Watch:
    """Puts a moment before and after each forward of a pipeline's modules."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.spans: list[tuple[Moment, Moment]] = []
        self.late: list[int] = []  # forwards that the device waited for

    @contextmanager
    def on(self, pipe: Any) -> Iterator[None]:
        """Watch forwards of engines that are loaded and closed inside."""
        targets = Interception(pipe.components).targets
        for target in targets:
            plain = getattr(target.module, target.method)
            target.module.__dict__[target.method] = self._watched(plain)
        try:
            yield
        finally:
            for target in targets:
                del target.module.__dict__[target.method]

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # keeps the signature, by which the engine knows arguments
        def method(*args: Any, **kwargs: Any) -> Any:
            if self.spans and self._marks.is_past(self.spans[-1][1]):
                self.late.append(len(self.spans))
            begin = self._marks.now()
            answer = original(*args, **kwargs)
            self.spans.append((begin, self._marks.now()))
            return answer

        return method

    def forget(self) -> None:
        self.spans, self.late = [], []

    def busy_s(self) -> float:
        """In forwards, as the device saw it; all of them are over."""
        return sum(self._marks.between(*span) for span in self.spans)

    def waited_s(self) -> float:
        """Between forwards, before those that came late."""
        return sum(self._marks.between(self.spans[i - 1][1], self.spans[i][0]) for i in self.late)


def warm_up(engine: carpool.Engine, requests: Sequence[carpool.Request]) -> float:
    """Run a few of the requests in companies of several sizes; seconds that took."""
    began_s = time.perf_counter()
    for width in WIDTHS:
        engine.generate(list(requests[:width]), progress=False)
    return time.perf_counter() - began_s


def run(
    engine: carpool.Engine,
    requests: Sequence[carpool.Request],
    watch: Watch,
    marks: Marks,
    **names: Any,
) -> Run:
    """All requests at once, through an engine that is warm.

    Args:
        names: what `Run` says of it besides: the model, its size, the mode, ...
    """
    marks.wait()
    marks.peak_gib()
    watch.forget()
    before, began_s = engine.statistics(), time.perf_counter()
    outputs = engine.generate(list(requests), progress=False)
    wall_s = time.perf_counter() - began_s
    marks.wait()
    after = engine.statistics()
    spent = {name: after[name] - before[name] for name in ("turn_s", "forward_s", "fiber_s")}
    forwards = len(watch.spans)
    latencies = sorted(one.timings.total_s for one in outputs)
    return Run(
        **names,
        requests=len(requests),
        per_s=len(requests) / wall_s,
        p50_s=statistics.median(latencies),
        p99_s=latencies[math.ceil(0.99 * len(latencies)) - 1],
        forwards=forwards,
        rows=_denoised_rows(before, after),
        loop_us=(spent["turn_s"] - spent["forward_s"] - spent["fiber_s"]) / forwards * 1e6,
        fiber_us=spent["fiber_s"] / forwards * 1e6,
        in_forwards=watch.busy_s() / wall_s,
        late=len(watch.late) / forwards,
        waited=watch.waited_s() / wall_s,
        peak_gib=marks.peak_gib(),
    )


def _denoised_rows(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Mean rows of the denoiser's forwards between two statistics."""

    def tally(found: dict[str, Any], sign: int) -> tuple[int, int]:
        ones = [one for one in found["forwards"] if one["component"] in ("transformer", "unet")]
        count = sum(one["count"] for one in ones)
        return sign * count, sign * sum(one["count"] * one["rows"] for one in ones)

    count, rows = (sum(two) for two in zip(tally(after, 1), tally(before, -1), strict=True))
    return rows / count


def likeness(engine: carpool.Engine, requests: Sequence[carpool.Request], **names: Any) -> Likeness:
    """Compare what requests get together with what each gets alone, pixel by pixel.

    Raises:
        AssertionError: what they get alone is not finite, and no judge.
    """
    together = [_pixels(one) for one in engine.generate(list(requests), progress=False)]
    alone = [_pixels(engine.generate(one, progress=False)[0]) for one in requests]
    assert all(one.isfinite().all() for one in alone), "a picture alone is not finite"
    found = [psnr(a, b) for a, b in zip(together, alone, strict=True)]
    return Likeness(
        **names,
        requests=len(requests),
        worst_db=min(found),
        median_db=statistics.median(found),
        others_db=psnr(alone[0], alone[1]),
    )


def _pixels(output: carpool.Output) -> Tensor:
    found: Any = output.frames if output.images is None else output.images
    return Tensor.float(found)


def psnr(one: Tensor, other: Tensor) -> float:
    """Peak signal to noise ratio of values 0-1, dB; infinite for equal ones."""
    error = float((one - other).square().mean())
    return 10 * math.log10(1 / error) if error else math.inf


def kernels_share(
    engine: carpool.Engine, requests: Sequence[carpool.Request], marks: Marks
) -> float | None:
    """The share of a stretch of requests in which the device ran any kernel; None off CUDA."""
    if not marks.is_cuda:
        return None
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            engine.generate(list(requests), progress=False)
        profiler.export_chrome_trace(str(trace))
        return share_of_kernels(json.loads(trace.read_text())["traceEvents"])


def share_of_kernels(events: Sequence[dict[str, Any]]) -> float:
    """Of the time from the first kernel to the end of the last, what kernels covered.

    Args:
        events: of a Chrome trace, as torch's profiler writes it.

    Raises:
        ValueError: there is no kernel among them.
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
