"""Part *compiled*: seconds by rows, and the engine, with repeated blocks compiled (`--compile`).

The seconds of compiling are in `took s` of a model's first row.
"""

from functools import partial

from benchmarks import gpu_engine, gpu_rows
from benchmarks.gpu_build import Built, Rig
from benchmarks.gpu_claims import compiled, tried
from benchmarks.gpu_records import Rows
from carpool.engine.model.compiling import keep_device_guard, repeated_blocks

NAMES = ("flux", "qwen-image")  # models measured through the engine


def compile_blocks(subject: Built) -> None:
    keep_device_guard()
    for block in repeated_blocks(subject.denoiser):  # even if diffusers lists none
        block.compile(backend="eager" if subject.rig.is_tiny else "inductor")


def measure(rig: Rig, rows: Rows) -> None:
    gpu_rows.measure(rig, rows, compile_blocks, "compiled")
    gpu_engine.measure(rig, rows, compile_blocks, "compiled", NAMES, ("off", "continuous"))
    if not rig.is_tiny:  # the compiler of CPUs takes minutes
        rows.measure("shapes, pictures", partial(tried, compiled, rig))
