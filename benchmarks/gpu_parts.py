"""The parts of `gpu.py`: one model is built once, then each part makes one record of it."""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

import carpool
from benchmarks import gpu_engine
from benchmarks.gpu_build import denoiser_call, filled, operations, pipeline_of, request, weightless
from benchmarks.gpu_clock import Deadline, Marks
from benchmarks.gpu_models import Model, Size
from benchmarks.gpu_page import Report
from benchmarks.gpu_report import Curve, Kernels, Likeness, Record, Run
from carpool.config import BatchingMode
from carpool.engine.fuse import Fuser
from carpool.engine.model.compiling import repeated_blocks

COMPILING_S = 60.0  # a guess, and SLACK another: they only decide whether a part is begun
SLACK = 1.3  # for decoding, and what is not in forwards
DELAY_MS = 8.0  # that a batch may wait to fill
STRETCH = 8  # requests under the profiler
ALIKE = 4  # requests whose pictures are compared


@dataclass(frozen=True, slots=True)
class Bench:
    """How everything is measured, and where it is reported."""

    marks: Marks
    dtype: torch.dtype
    report: Report
    tflops: float  # of the machine
    parts: tuple[str, ...]
    modes: tuple[BatchingMode, ...]
    sizes: tuple[str, ...]  # none: all of the model
    requests: int
    rows: tuple[int, ...]
    max_batch_size: int  # of the engine, rows
    compiler: dict[str, Any] = field(default_factory=dict)  # its options


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    work: Callable[[Deadline], Record | None]
    needs_s: Callable[[], float] = float  # about; 0: it minds the time itself, or takes none


@dataclass(frozen=True, slots=True)
class Built:
    """A model on the device, and the requests for it."""

    model: Model
    pipe: Any
    denoiser: Any
    bench: Bench

    def requests(self, size: Size, count: int, *, shortest: bool = False) -> list[carpool.Request]:
        """Requests with guidance as published and steps in turn, or all with the fewest steps.

        Prompts are their own; the negative one is the same object for all, or `dynamic`, which
        compares it, would not batch them.
        """
        steps = [min(self.model.steps)] if shortest else self.model.steps
        given = self.request(size, 1).parameters
        shared = {name: value for name, value in given.items() if name.startswith("negative_")}
        turns = enumerate(islice(cycle(steps), count))
        return [self.request(size, n, seed=i, **shared) for i, n in turns]

    def request(self, size: Size, steps: int, **more: Any) -> carpool.Request:
        device, dtype = self.bench.marks.device, self.bench.dtype
        return request(self.model, size, steps, device, dtype=dtype, **more)

    def engine(self, mode: BatchingMode) -> carpool.Engine:
        device = str(self.bench.marks.device)
        settings = {"max_batch_size": self.bench.max_batch_size, **self._batches(mode)}
        return carpool.load(self.pipe, device=device, batching_mode=mode, **settings)

    def _batches(self, mode: str) -> dict[str, Any]:
        """Batches as large as `continuous` may make its forwards, where a mode must be told."""
        most = self.bench.max_batch_size
        modes = {
            "dynamic": {"batching_max_size": most, "batching_delay_ms": DELAY_MS},
            "request": {"max_num_seqs": most, "request_batch_max_wait_ms": DELAY_MS},
        }
        return modes.get(mode, {})

    def names(self, size: Size) -> dict[str, str]:
        return {"model": self.model.title, "size": str(size)}

    def run_s(self, size: Size, count: int) -> float:
        """About how long so many requests take, from the curve, where there is one."""
        steps = sum(islice(cycle(self.model.steps), count))
        rows = 2 if self.model.has_negative else 1
        return SLACK * steps * rows * self._forward_s(size)

    def _forward_s(self, size: Size) -> float:
        for one in reversed(self.bench.report.records):
            if isinstance(one, Curve) and (one.model, one.size) == (self.model.title, str(size)):
                return one.points[0][1]
        return 0.0


def built(bench: Bench, model: Model) -> Built:
    began_s = time.perf_counter()
    denoiser, vae = (
        filled(weightless(part), bench.marks.device, bench.dtype)
        for part in (model.denoiser, model.vae)
    )
    bench.marks.wait()
    print(f"{model.title}: built in {time.perf_counter() - began_s:.1f} s", file=sys.stderr)
    return Built(model, pipeline_of(model, denoiser, vae), denoiser, bench)


@torch.no_grad()
def curve(one: Built, size: Size, deadline: Deadline) -> Curve:
    """One request's first forward, joined with itself as the engine joins requests'."""
    bench, fuser, limit = one.bench, Fuser(), deadline.share(3)
    tflop = operations(one.model, size) / 1e12
    call = denoiser_call(one.pipe, one.model, one.request(size, 2, is_guided=False))
    assert fuser.describe(call)[1] == 1, "without guidance a step is one row"
    seconds: dict[str, float] = {}
    bench.marks.peak_gib()
    for rows in bench.rows:
        if seconds and 8 * max(seconds.values()) > limit.left_s:
            break  # measuring twice as many rows would take too long
        work = functools.partial(fuser.run, [call] * rows, [1] * rows)
        try:
            seconds[str(rows)] = bench.marks.seconds(work)
        except torch.OutOfMemoryError:
            break
    return Curve(**one.names(size), tflop=tflop, seconds=seconds, tflops=bench.tflops,
                 peak_gib=bench.marks.peak_gib())  # fmt: skip


def run(one: Built, size: Size, mode: BatchingMode, code: str, _: Deadline) -> Run:
    """Through an engine that has tried a few widths, but has not seen the compiler at work."""
    watch, short = gpu_engine.Watch(one.bench.marks), one.requests(size, 8, shortest=True)
    with one.engine(mode) as engine:
        warm_up_s = gpu_engine.warm_up(engine, short)
    with watch.on(one.pipe), one.engine(mode) as engine:
        gpu_engine.warm_up(engine, short)
        return gpu_engine.run(
            engine, one.requests(size, one.bench.requests), watch, one.bench.marks,
            **one.names(size), mode=mode, code=code, warm_up_s=warm_up_s,
            steps="/".join(map(str, one.model.steps)),
        )  # fmt: skip


def kernels(one: Built, size: Size, code: str, _: Deadline) -> Kernels | None:
    requests = one.requests(size, STRETCH, shortest=True)
    with one.engine("continuous") as engine:
        engine.generate(requests, progress=False)
        share = gpu_engine.kernels_share(engine, requests, one.bench.marks)
    return None if share is None else Kernels(**one.names(size), code=code, share=share)


def likeness(one: Built, size: Size, _: Deadline) -> Likeness:
    requests = [
        one.request(size, steps, seed=i, output_type="pt")
        for i, steps in enumerate(islice(cycle(one.model.steps), ALIKE))
    ]
    with one.engine("continuous") as engine:
        return gpu_engine.likeness(engine, requests, **one.names(size))


def parts(one: Built) -> Iterator[Part]:
    """All parts of a model in their order: what is compiled stays so."""
    sizes = [size for size in one.model.sizes if str(size) in (one.bench.sizes or {str(size)})]
    for size in sizes:
        yield Part(f"curve {size}", functools.partial(curve, one, size))
    for size in sizes:
        yield from _engine_parts(one, size, "eager")
        work = functools.partial(likeness, one, size)
        yield Part(f"likeness {size}", work, functools.partial(one.run_s, size, 2 * ALIKE))
    yield Part("compiled", functools.partial(_compile, one))
    if _is_compiled(one.denoiser):
        for size in sizes:
            yield from _engine_parts(one, size, "compiled")


def _engine_parts(one: Built, size: Size, code: str) -> Iterator[Part]:
    def needs_s(count: int = one.bench.requests) -> float:
        return one.run_s(size, count) + (COMPILING_S if code == "compiled" else 0)

    for mode in one.bench.modes:
        yield Part(f"{code} {size} {mode}", functools.partial(run, one, size, mode, code), needs_s)
    work = functools.partial(kernels, one, size, code)
    yield Part(f"kernels {size} {code}", work, functools.partial(needs_s, 2 * STRETCH))


def _compile(one: Built, _: Deadline) -> None:
    for block in repeated_blocks(one.denoiser):  # of classes for which diffusers names none, too
        block.compile(**one.bench.compiler)


def _is_compiled(denoiser: nn.Module) -> bool:
    return any(part._compiled_call_impl is not None for part in denoiser.modules())
