"""Part *engine*: requests through the engine in each mode, and plain diffusers with a lock.

*Closed*: eight clients, each of which sends its next request after an answer.
*Poisson*: arrivals at 0.9 of the capacity of plain diffusers. Steps are those of the published
measurements, or estimates. `published`: requests a second of SGLang, one by one -> batched (closed
loop, H100; FLUX.1-dev and Qwen-Image-2512 at 512 px).

`loop us` and `pipeline us`: microseconds per forward of the engine's loop and of pipeline code.
"""

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

from benchmarks.gpu_build import Built, Rig
from benchmarks.gpu_records import Rows
from carpool import Request

PUBLISHED = {"FLUX.1-dev": "0.497 -> 0.554", "Qwen-Image": "0.483 -> 0.725"}
NAMES = ("flux", "qwen-image", "sdxl", "z-image")
LOADS = ("closed", "Poisson")
MODES = ("continuous", "dynamic", "off")  # the most important first
STEPS = {"flux": (28,), "qwen-image": (50,)}  # other models: mixed
CLIENTS, COUNT = 8, 16
LOAD = 0.9  # Poisson arrivals, relative to the capacity of plain diffusers
WARM = (1, 2, 3, 8)  # warm-up bursts, so that widths are known
DELAY_MS = 8.0  # longest wait of a batch to fill


def measure(
    rig: Rig,
    rows: Rows,
    prepare: Callable[[Built], None] = lambda subject: None,
    code: str = "eager",
    names: Sequence[str] = NAMES,
    modes: Sequence[str] = ("plain", *MODES),
) -> None:
    for load, name in product(LOADS, names):
        labels = [(mode, f"{rig.model(name).title} {load} {mode} {code}") for mode in modes]
        if rows.left_s <= 0 or all(rows.has(label) for _, label in labels):
            continue
        with rig.built(name) as subject:
            prepare(subject)
            steps = (2, 3) if rig.is_tiny else STEPS.get(name, subject.model.steps)
            requests = subject.requests(subject.model.sizes[0], 4 if rig.is_tiny else COUNT, steps)
            alone_s = rig.marks.seconds(partial(subject.plain, requests[0]), min_runs=1)
            for mode, label in labels:
                work = partial(_row, subject, requests, load, mode, alone_s)
                rows.measure(label, work, needs_s=1.2 * alone_s * len(requests))


def _row(
    subject: Built, requests: list[Request], load: str, mode: str, alone_s: float
) -> dict[str, Any]:
    gaps = [] if load == "closed" else _gaps(len(requests), alone_s / LOAD)
    marks = subject.rig.marks
    with ExitStack() as stack:
        if mode == "plain":
            lock, cells = threading.Lock(), dict[str, Any]()

            def draw(request: Request) -> object:
                with lock:
                    return subject.plain(request)

        else:
            engine = stack.enter_context(subject.engine(**settings_of(mode)))
            for width in WARM:
                short = subject.requests(subject.model.sizes[0], min(width, len(requests)), (2,))
                engine.generate(short, progress=False)
            before = engine.statistics()

            def draw(request: Request) -> object:
                return engine.generate(request, progress=False)

        marks.peak_gib()
        took_s, latencies = played(draw, requests, gaps)
        if mode != "plain":
            cells = _of_engine(before, engine.statistics())
    return {
        "requests/s": len(requests) / took_s,
        "mean s": statistics.mean(latencies),
        "p99 s": latencies[math.ceil(0.99 * len(latencies)) - 1],
        **cells,
        "peak GiB": marks.peak_gib(),
        "published": PUBLISHED.get(subject.model.title, "") if load == "closed" else "",
    }


def settings_of(mode: str) -> dict[str, Any]:
    options = {"batching_max_size": 8, "batching_delay_ms": DELAY_MS} if mode == "dynamic" else {}
    return {"batching_mode": mode, "max_batch_size": 8, **options}


def _gaps(count: int, mean_s: float) -> list[float]:
    chance = random.Random(0)
    return [chance.expovariate(1 / mean_s) for _ in range(count)]


def played(
    draw: Callable[[Request], object], requests: Sequence[Request], gaps: Sequence[float]
) -> tuple[float, list[float]]:
    """Send requests; returns total seconds, and the latency of each from its scheduled time.

    Args:
        gaps: seconds before each request; empty: a closed loop of `CLIENTS`.
    """

    def timed(request: Request, due_s: float | None) -> float:
        began_s = time.monotonic() if due_s is None else due_s
        draw(request)
        return time.monotonic() - began_s

    first_s = time.monotonic()
    with ThreadPoolExecutor(len(requests) if gaps else CLIENTS) as pool:
        futures = []
        for i, request in enumerate(requests):
            if gaps:
                time.sleep(gaps[i])
            futures.append(pool.submit(timed, request, time.monotonic() if gaps else None))
        latencies = sorted(future.result() for future in futures)
    return time.monotonic() - first_s, latencies


def _of_engine(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The engine's work between two statistics: rows of forwards, and overhead."""

    def tally(stats: dict[str, Any]) -> tuple[int, int, int]:
        denoised = [f for f in stats["forwards"] if f["component"] in ("transformer", "unet")]
        count = sum(entry["count"] for entry in denoised)
        rows = sum(entry["count"] * entry["rows"] for entry in denoised)
        return sum(entry["count"] for entry in stats["forwards"]), count, rows

    forwards, count, rows = (b - a for a, b in zip(tally(before), tally(after), strict=True))
    turn, forward, fiber = (after[k] - before[k] for k in ("turn_s", "forward_s", "fiber_s"))
    return {
        "rows": rows / count,
        "loop us": round((turn - forward - fiber) / forwards * 1e6),
        "pipeline us": round(fiber / forwards * 1e6),
    }
