"""Part *streamed*: eight requests over weights that are all streamed from pinned memory.

A shared sweep for all requests, requests one by one, and diffusers' group offload one by one
(one request, times eight). `s for 8`: seconds for the row's steps; `published`: for 50 steps on an
unnamed GPU, one by one -> batched. *Copying*: time of the bus for the bytes of all sweeps.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from diffusers.hooks import apply_group_offloading

from benchmarks.gpu_build import Rig
from benchmarks.gpu_records import Rows
from benchmarks.stream_bus import swept
from carpool import Request

PUBLISHED = {"FLUX.1-dev": "167.6 -> 34.5 s", "Qwen-Image": "586.7 -> 81.9 s"}
NAMES = ("flux", "qwen-image")
COUNT, STEPS = 8, 10


def measure(rig: Rig, rows: Rows) -> None:
    for name in NAMES:
        for label, way in WAYS.items():
            row = f"{rig.model(name).title}, {label}"
            rows.measure(row, partial(_row, rig, name, way), needs_s=30)


def _row(rig: Rig, name: str, way: Any) -> dict[str, Any]:
    with rig.built(name) as subject:
        size, count = subject.model.sizes[0], 2 if rig.is_tiny else COUNT
        steps = 2 if rig.is_tiny else STEPS
        cells = way(subject, subject.requests(size, count, (steps,)))
        return {"size": str(size), "steps": steps, "requests": count, **cells,
                "peak GiB": rig.marks.peak_gib(),
                "published": PUBLISHED[subject.model.title]}  # fmt: skip


def _through_engine(subject: Any, sets: list[list[Request]]) -> dict[str, Any]:
    short = subject.requests(subject.model.sizes[0], 2, (2,))
    with subject.engine(stream="transformer", max_batch_size=COUNT) as engine:
        engine.generate(short, progress=False)
        took_s, sweeps, moved = swept(engine, sets)
        copying_s = moved * engine.statistics()["streaming"]["seconds_a_gib"]
    return {"s for 8": took_s, "sweeps": sweeps, "GiB moved": moved, "copying s": copying_s}


def _diffusers(subject: Any, requests: list[Request]) -> dict[str, Any]:
    device = subject.rig.device
    apply_group_offloading(
        subject.denoiser, onload_device=device, offload_type="block_level", num_blocks_per_group=1,
        use_stream=device.type in ("cuda", "xpu"),
    )  # fmt: skip
    subject.plain(subject.requests(subject.model.sizes[0], 1, (2,))[0])
    subject.rig.marks.wait()
    began_s = time.monotonic()
    subject.plain(requests[0])
    subject.rig.marks.wait()
    return {"s for 8": len(requests) * (time.monotonic() - began_s)}


WAYS: dict[str, Callable[[Any, list[Request]], dict[str, Any]]] = {
    "one sweep for all": lambda subject, requests: _through_engine(subject, [requests]),
    "one by one": lambda subject, requests: _through_engine(subject, [[r] for r in requests]),
    "diffusers, one by one": _diffusers,
}
