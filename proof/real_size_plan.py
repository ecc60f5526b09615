"""Compare predictions of `carpool plan` for this CPU with measurements."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_clock import Marks, matmul_tflops
from carpool_lab.plan.advice import bits_of
from carpool_lab.plan.predict import DeviceSpec, forward_s
from carpool_lab.plan.shapes import build, stages

GB = 1e9
SIDE = 1024  # side of the matrix product that measures the CPU's speed


def here(link: float) -> DeviceSpec:
    """This CPU as a device: a measured product and a measured copy are its data sheet.

    Args:
        link: bytes a second of the disk with the streamed weights.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    marks = Marks(torch.device("cpu"))
    flops = matmul_tflops(marks, SIDE, torch.bfloat16) * 1e12
    source = torch.ones(1 << 26)
    bandwidth = 2 * source.nbytes / marks.seconds(source.clone)
    threads, tiles = torch.get_num_threads(), ((1, 1, 1.0),)  # its kernels pad no rows
    return DeviceSpec("cpu", "this CPU", 0, flops, bandwidth, threads, link, "measured", tiles)


def rows(
    model: Path, before: dict[str, Any], after: dict[str, Any], body: dict[str, Any], kind: str
) -> Iterator[list[str]]:
    """Yield rows: bytes and seconds of a forward for each component.

    Args:
        before: the engine's statistics before a single request.
        after: its statistics after the request.
        body: body of the request.
        kind: kind of the denoisers' weights; "" as in the folder. The planner's is int8.
    """
    options = {name: body[name] for name in body.keys() & {"num_frames", "max_sequence_length"}}
    shapes = replace(build(str(model)), call=options)
    bits = bits_of("int8", shapes) if kind else {}
    for part, count in shapes.parameters().items():
        files = [*(model / part).glob("*.safetensors")]
        if part in bits:
            files = [*model.parent.glob(f"{model.name}-{part}.gguf")] if "GGUF" in kind else []
        if n_bytes := sum(file.stat().st_size for file in files):
            planned_gb = count * bits.get(part, 16) / 8 / GB
            yield [f"{part}, GB", *compared(planned_gb, n_bytes / GB)]
    streaming = after["streaming"]
    device = here(1 / (streaming["seconds_a_gib"] or 1e-9) * 2**30)
    means = seconds_of(before, after)
    for stage in stages(shapes, body["size"]):
        name = f"{stage.component}.{stage.method}"
        streamed = streaming["streamed_bytes"].get(stage.component, 0)
        if name in means:
            sizes = {"weight_bytes": bits.get(stage.component, 16) / 8, "streamed_bytes": streamed}
            planned = forward_s(stage.work, 1, device, **sizes)
            yield [f"{name}, s a forward", *compared(planned, means.pop(name))]


def seconds_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Mean seconds of the forwards between two statistics."""
    means = {}
    histograms = {entry["component"]: entry["histogram"] for entry in before["seconds"]}
    for entry in after["seconds"]:
        new = entry["histogram"]
        old = histograms.get(entry["component"], {"sum": 0.0, "counts": [0]})
        if count := sum(new["counts"]) - sum(old["counts"]):
            means[entry["component"]] = (new["sum"] - old["sum"]) / count
    return means


def compared(planned: float, measured: float) -> list[str]:
    return [f"{planned:.3g}", f"{measured:.3g}", f"{planned / measured - 1:+.0%}"]
