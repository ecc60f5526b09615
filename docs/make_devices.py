"""Write `docs/devices.md`: where the host waits for the device, by model family.

usage: make devices    (a test compares each row with what it measures)
"""

import sys
from pathlib import Path

import diffusers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "devices.md"
HEAD = f"""# Devices

`make devices` writes this page.

`--device` takes `cpu`, `cuda` (also for ROCm), `xpu`, `mps`, or one of several, such as `cuda:1`.
`auto` is torch's accelerator if there is one, else the CPU. On a kind of device without events the
engine waits for each forward before it prepares the next, with a line in the log; on one with a
single stream, results are copied after the queued forwards.

## Claims of the simulated device

These claims hold on the simulated device. `python -m benchmarks.gpu_page check waits` tests each of
them on a real one and names those that fail. On an [H200](gpu-h200.md) all held,
*ahead* with FLUX.1-dev, *lost* after a repair.

{{claims}}

## Where the host waits

A pipeline that reads a number from the device, or copies one to it from ordinary memory, waits
until all queued work is done. Such waits cost only time. The engine makes none during steps, and
copies what pipelines and schedulers make on the host through pinned memory.

The table counts the waits of one of two requests of six steps that share their forwards, per step
and in total, on a simulated device (real values under another device's label,
`tests/support/pretended`), with the same pictures as on a CPU. Columns name the code that waits:
the engine, the scheduler or the pipeline (diffusers {diffusers.__version__}), or a model
(diffusers, transformers); the last column lists the waits of a step. Rows are one task of each
family of [models.md](models.md). Not counted: Helios Mid and Distilled, whose steps have stages,
models of few steps (FastWan, TurboWan), and Hunyuan3D-2.

| model | engine | scheduler | pipeline | model | in all: engine | scheduler | \
pipeline | model | at each step |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def head() -> str:
    """The page above its table."""
    sys.path[:0] = [str(ROOT)]
    from benchmarks.gpu_claims import listed

    return HEAD.replace("{claims}", "\n".join(listed()))


def main() -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from support import torchvision_cpu

    torchvision_cpu.install()
    from support.pretended import device

    device.install()
    from support.matrix import CASES
    from support.pretended.measure import FIRST, measure, row

    cases = {case.name: case for case in CASES}
    lines = []
    for name in FIRST:
        if cases[name].needs_torchvision and not torchvision_cpu.IS_THERE:
            raise SystemExit(f"{name} needs torchvision: `make build/torchvision`")
        lines.append(row(name, measure(name)))
        sys.stdout.write(lines[-1] + "\n")
    PAGE.write_text(head() + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
