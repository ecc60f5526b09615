"""Requests of a model of real size over a bus that is slower than computing, as PCIe is for a GPU.

Loads of streamed blocks are held to that bandwidth; what is loaded when is decided by the engine.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import carpool
from benchmarks.stream_bus import HeldBus
from carpool.engine.weights import placement

GIB = 2**30
STEPS = 1  # one by one, a step of each request takes a sweep over all


def measure(
    model: Path, memory: str, bodies: Sequence[dict[str, Any]], bytes_per_s: float
) -> Iterator[list[str]]:
    """Rows: all requests at once, and one after the other.

    What may share a sweep is observed in a first round, which is not measured.
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
                before, began_s = engine.statistics()["streaming"], time.monotonic()
                for requests_of_set in sets:
                    engine.generate(requests_of_set, progress=False)
                took_s, after = time.monotonic() - began_s, engine.statistics()["streaming"]
                moved = (after["moved_bytes"] - before["moved_bytes"]) / GIB
                sweeps = after["sweeps"] - before["sweeps"]
                yield [f"{way}, {speed / 1e9:g} GB/s", f"{took_s:.0f}", str(sweeps), f"{moved:.0f}"]
    finally:
        setattr(placement, "Bus", bus)  # noqa: B010
