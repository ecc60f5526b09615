"""Part *check*: does the engine run, and do its outputs equal plain diffusers'?

- `carpool check`, and `carpool bench` with 64 requests at once to `carpool serve`, on the embedded
  model; and the tests that need a GPU. All of it runs at once, because a lease is short.
- Each main family at real size: two requests with different steps together, against each alone in
  plain diffusers, as PSNR in decibels (`equal`: no difference), and the PSNR of unrelated pictures.
- Claims of the simulated device on a real one: `gpu_claims.py`.
"""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks import gpu_claims
from benchmarks.gpu_build import Rig, pixels
from benchmarks.gpu_models import MODELS
from benchmarks.gpu_records import Rows

LIMIT_S = 300.0  # time limit of a program
CLOSE_DB = 30.0  # PSNR of rounding differences in two bits of bfloat16
STEPS = (2, 3)
CHECK = "from carpool_lab.check.command import check; check()"  # works uninstalled
BENCH = """
import asyncio
from carpool_lab.load.command import bench
from carpool_lab.load.sweep import serving

async def served():
    async with serving("shapes", "continuous") as url:
        await asyncio.to_thread(bench, ["--url", url, "--num-prompts", "64"])

asyncio.run(served())
"""
TESTS = "-m", "gpu", "-o", "filterwarnings=default", "tests/engine/test_gpu.py"


def measure(rig: Rig, rows: Rows) -> None:
    programs = {
        "carpool check": ("-c", CHECK, "shapes", "--quick", "--device", str(rig.device)),
        "carpool bench, over HTTP": ("-c", BENCH),
        "tests on CUDA": ("-m", "pytest", "-q", "--noconftest", *TESTS),
    }
    with ThreadPoolExecutor() as pool:
        missing = [name for name in programs if not rows.has(name)]
        running = {name: pool.submit(_program, programs[name]) for name in missing}
        for name, claim in gpu_claims.CLAIMS.items():
            if claim.check is not None:
                rows.measure(name, partial(gpu_claims.tried, claim.check, rig))
        for name in MODELS:
            rows.measure(MODELS[name].title, partial(_family, rig, name))
        for name, program in running.items():
            rows.measure(name, program.result)


def _program(arguments: tuple[str, ...]) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
    )  # fmt: skip
    output = (result.stdout + result.stderr).strip().splitlines()
    if result.returncode:
        raise RuntimeError(f"status {result.returncode}: {' / '.join(output[-4:])}")
    lines = result.stdout.strip().splitlines()
    lines = [line for line in lines if "Successful requests" in line] or lines
    return {"table": "Programs", "outcome": lines[-1] if lines else "it ended well"}


def _family(rig: Rig, name: str) -> dict[str, Any]:
    with rig.built(name) as subject:
        size = subject.model.sizes[0]
        make = partial(subject.request, size, output_type="pt")
        requests = [make(count, seed=i) for i, count in enumerate(STEPS)]
        alone = [pixels(subject.plain(request)) for request in requests]
        rig.marks.peak_gib()
        with subject.engine() as engine:
            together = [pixels(answer) for answer in engine.generate(requests, progress=False)]
        return {"table": "Families", "size": str(size), **likeness(together, alone),
                "peak GiB": rig.marks.peak_gib()}  # fmt: skip


def likeness(together: list[Tensor], alone: list[Tensor]) -> dict[str, str]:
    """Compare pictures with those of plain diffusers.

    Raises:
        AssertionError: the pictures differ, or are not finite.
    """
    assert all(p.isfinite().all() for p in alone), "a picture of plain diffusers is not finite"
    least_db = min(psnr(a, b) for a, b in zip(together, alone, strict=True))
    other_db = psnr(alone[0], alone[1])
    is_close = least_db > max(CLOSE_DB, other_db)
    assert is_close, f"{least_db:.1f} dB; two unlike ones have {other_db:.1f}"
    agreement = "equal" if math.isinf(least_db) else f"{least_db:.1f} dB"
    return {"against plain": agreement, "two unlike ones": f"{other_db:.1f} dB"}


def psnr(first: Tensor, second: Tensor) -> float:
    """Peak signal-to-noise ratio of values 0-1, dB; infinite for equal pictures."""
    error = float((first - second).square().mean())
    return 10 * math.log10(1 / error) if error else math.inf
