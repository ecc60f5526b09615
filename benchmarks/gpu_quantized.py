"""Part *quantized*: the denoiser quantized at loading, compared with bfloat16.

A model is written to a temporary folder and loaded by `carpool.load(quantize=...)`. *Together*:
four requests against each alone. If a package or kernel is missing, the row says so.
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import carpool
from benchmarks.gpu_build import Rig, pixels
from benchmarks.gpu_check import psnr
from benchmarks.gpu_records import Rows
from carpool import Request

NAME = "sdxl"  # its pipeline can be saved without text encoders
KINDS = ("none", "int8", "fp8", "nf4", "fp8-dynamic", "int4", "int8-dynamic")
COUNT, STEPS = 4, (4, 6)


def measure(rig: Rig, rows: Rows) -> None:
    if all(rows.has(kind) for kind in KINDS):
        return
    with tempfile.TemporaryDirectory() as folder:
        with rig.built(NAME) as subject:
            subject.pipe.save_pretrained(folder)
            requests = [
                subject.request(subject.model.sizes[0], STEPS[i % 2], seed=i, output_type="pt")
                for i in range(COUNT)
            ]
        plain: list[Any] = []
        for kind in KINDS:
            rows.measure(kind, partial(_row, rig, Path(folder), kind, requests, plain), needs_s=20)


def _row(
    rig: Rig, folder: Path, kind: str, requests: list[Request], plain: list[Any]
) -> dict[str, Any]:
    dtype = str(rig.dtype).removeprefix("torch.")
    quantize = None if kind == "none" else f"unet={kind}"
    rig.marks.peak_gib()
    device = str(rig.device)
    with carpool.load(folder, device=device, dtype=dtype, quantize=quantize) as engine:
        engine.generate(requests, progress=False)  # warm-up
        began_s = time.monotonic()
        together = [pixels(output) for output in engine.generate(requests, progress=False)]
        took_s = time.monotonic() - began_s
        began_s = time.monotonic()
        alone = [pixels(engine.generate(request, progress=False)[0]) for request in requests]
        alone_s = time.monotonic() - began_s
    if kind == "none":
        plain[:] = alone
    shares = f"{min(map(psnr, together, alone)):.1f} dB"
    return {
        "requests/s": len(requests) / took_s,
        "alone": len(requests) / alone_s,
        "together against alone": shares,
        "against bfloat16": f"{min(map(psnr, alone, plain)):.1f} dB" if plain else "",
        "peak GiB": rig.marks.peak_gib(),
    }
