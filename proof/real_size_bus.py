"""Requests of a real-size model over a bus that is slower than computing, like PCIe for a GPU.

Loads of streamed blocks are limited to that bandwidth; the engine decides what is loaded when.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import carpool
from benchmarks.stream_bus import HeldBus, swept
from carpool.engine.weights import placement

STEPS = 1  # without sharing, each step of a request needs a sweep


def measure(
    model: Path, memory: str, bodies: Sequence[dict[str, Any]], bytes_per_s: float
) -> Iterator[list[str]]:
    """Yield rows: all requests at once, and in sequence.

    An unmeasured first round lets the engine observe which calls may share a sweep.
    """
    speed = bytes_per_s

    class Bus(HeldBus):
        bytes_per_s = speed

    requests = []
    for body in bodies:
        width, height = map(int, body["size"].split("x"))
        options = {n: v for n, v in body.items() if n not in ("size", "prompt", "seed")}
        options |= {"width": width, "height": height, "num_inference_steps": STEPS}
        requests.append(carpool.Request(body["prompt"], seed=body["seed"], **options))
    bus = vars(placement)["Bus"]
    setattr(placement, "Bus", Bus)  # noqa: B010
    try:
        with carpool.load(model, device="cpu", dtype="bfloat16", memory=memory) as engine:
            engine.generate(requests, progress=False)
            for way, sets in (
                ("one sweep for all", [requests]),
                ("one by one", [[request] for request in requests]),
            ):
                took_s, sweeps, moved = swept(engine, sets)
                yield [f"{way}, {speed / 1e9:g} GB/s", f"{took_s:.0f}", str(sweeps), f"{moved:.0f}"]
    finally:
        setattr(placement, "Bus", bus)  # noqa: B010
