"""Predict seconds and memory on a device from its data sheet and the operations of forwards.

A matrix product takes the longer of two times: its tiles on the device's units, in whole waves, and
reading its operands. Attention runs at four fifths of the speed of products. All other operations
take 1.4 times as long as their memory traffic, and Python 7 us to launch each; compiled, they are
fused: two fifths of the traffic, and almost no launches. Weights that do not fit cross the bus at
every forward, in parallel with computing.

Sources: tile and wave quantization: NVIDIA, Matrix Multiplication Background User's Guide. The two
fractions of data sheets (0.80 of products, 0.90 of memory) and of traffic are fitted to one H200
(`docs/plans.md` has the errors); for other devices they are assumptions.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.errors import InvalidValue, nearest
from carpool.types import Phase
from carpool_lab.tables import knee

if TYPE_CHECKING:
    from carpool_lab.plan.work import CallGroup, Work

DEVICES = Path(__file__).with_name("devices.json")
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # requests in a forward
REACHED_FLOPS, REACHED_BANDWIDTH = 0.80, 0.90  # fractions of a data sheet
TILES = ((128, 256, 1.0), (128, 128, 0.85))  # rows, columns, relative speed
ATTENTION = 0.8
EAGER, COMPILED = (1.4, 7e-6), (0.4, 0.0)  # other operations: time of their traffic, launch in s
RESERVED_BYTES = 1_500_000_000  # device memory for context, libraries, fragmentation
VALUE_BYTES = 2  # bytes of an activation: bfloat16
MIN_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device by its data sheet."""

    key: str
    name: str
    memory_bytes: float
    flops: float  # per second, dense bfloat16, accumulated in float32
    bandwidth: float  # of its memory, bytes a second
    units: int  # streaming multiprocessors; each computes a tile
    link: float  # bytes a second from the host's memory, pinned
    source: str
    tiles: tuple[tuple[int, int, float], ...] = TILES  # of its kernels for matrix products


def device(key: str) -> DeviceSpec:
    """A device by its key.

    Raises:
        InvalidValue: no such device.
    """
    devices = json.loads(DEVICES.read_text())
    if key not in devices:
        hint = f"{nearest(key, devices)}: must be of {', '.join(devices)}"
        raise InvalidValue(f"device {key!r}{hint}")
    entry = devices[key]
    return DeviceSpec(
        key,
        entry["name"],
        entry["memory_gb"] * 1e9,
        entry["tflops"] * 1e12,
        entry["bandwidth_gbs"] * 1e9,
        entry["units"],
        entry["link_gbs"] * 1e9,
        entry["source"],
    )


def forward_s(
    work: "Work",
    width: int,
    on: DeviceSpec,
    *,
    weight_bytes: float = VALUE_BYTES,
    streamed_bytes: float = 0.0,
    is_compiled: bool = False,
) -> float:
    """Seconds of a forward of `width` requests.

    Args:
        work: work of one request.
        weight_bytes: bytes of one weight.
        streamed_bytes: bytes of weights that are not on the device.
    """
    speed, bandwidth = on.flops * REACHED_FLOPS, on.bandwidth * REACHED_BANDWIDTH
    seconds = work.attention_flops * width / (ATTENTION * speed)
    for (m, n, k), count in work.products.items():
        rows = m * width
        computed = min(
            ceil(ceil(rows / high) * ceil(n / wide) / on.units)
            * (high * wide * 2 * k * on.units / speed / fast)
            for high, wide, fast in on.tiles
        )
        read = (VALUE_BYTES * (rows * k + rows * n) + weight_bytes * n * k) / bandwidth
        seconds += count * max(computed, read)
    traffic, launch_s = COMPILED if is_compiled else EAGER
    seconds += traffic * work.element_bytes * width / bandwidth
    return max(seconds, work.operations * launch_s, streamed_bytes / on.link)


@dataclass(frozen=True, slots=True)
class Plan:
    """Prediction for a model at one size on one device."""

    size: str
    steps: int
    weights: Mapping[str, float]  # bytes by component
    streamed: Mapping[str, float]  # bytes that do not fit, by component
    seconds: Mapping[Phase, Mapping[int, float]]  # of a request's calls, by shared requests
    widest: int  # most requests whose activations fit

    @property
    def knee(self) -> int:
        """Largest worthwhile number of requests in a step."""
        step = {n: s for n, s in self.seconds["denoise"].items() if n <= self.widest}
        return knee(step, MIN_GAIN)

    def requests_per_s(self, width: int) -> float:
        return width / sum(self.seconds[phase][width] for phase in self.seconds)

    @property
    def fits(self) -> bool:
        return not any(self.streamed.values())


def plan(
    size: str,
    steps: int,
    parameters: Mapping[str, int],
    stages: "Sequence[CallGroup]",
    on: DeviceSpec,
    *,
    bits: Mapping[str, float] | None = None,
    is_compiled: bool = False,
) -> Plan:
    """Predict the seconds and memory of requests of one size.

    Args:
        size: name of the size.
        parameters: weights by component.
        stages: stages of one request.
        bits: mean bits of a weight by component; default 16.
    """
    value_bytes = {name: (bits or {}).get(name, 8 * VALUE_BYTES) / 8 for name in parameters}
    weights = {name: count * value_bytes[name] for name, count in parameters.items()}
    peak = max(stage.work.peak_bytes for stage in stages)
    row = max((stage.work.peak_bytes for stage in stages if stage.phase == "denoise"), default=0)
    calls = {name: sum(s.calls for s in stages if s.component == name) for name in parameters}

    def at(max_requests: int) -> Plan:
        """The plan that reserves memory for the activations of `max_requests`."""
        free = on.memory_bytes - RESERVED_BYTES - max(peak, max_requests * row)
        streamed = {}
        for name in sorted(weights, key=lambda name: -calls[name] / max(1.0, weights[name])):
            streamed[name] = max(0.0, weights[name] - max(0.0, free))
            free -= weights[name] - streamed[name]
        seconds: dict[Phase, dict[int, float]] = {}
        for stage in stages:
            curve = seconds.setdefault(stage.phase, dict.fromkeys(WIDTHS, 0.0))
            for width in WIDTHS:
                curve[width] += stage.calls * forward_s(
                    stage.work,
                    width,
                    on,
                    weight_bytes=value_bytes[stage.component],
                    streamed_bytes=streamed[stage.component],
                    is_compiled=is_compiled,
                )
        return Plan(size, steps, weights, streamed, seconds, max_requests)

    plans = [at(width) for width in WIDTHS]
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        return fitting[-1]
    return max(plans, key=lambda plan: plan.requests_per_s(plan.knee))
