"""Write `docs/devices.md`: where the host waits for the device, by model family.

usage: make devices    (a test compares each row with what it measures)
"""

import sys
from pathlib import Path

import diffusers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "devices.md"
HEAD = f"""# Devices

Made by `make devices`; do not edit.

`--device` takes `cpu`, `cuda` (ROCm calls itself so, too), `xpu`, `mps`, or one of several, as in
`cuda:1`. `auto` is the accelerator that torch finds, else the CPU. Where a kind of device has no
events, every forward is waited for before the next one is prepared, and the log says so; where it
has one stream only, results are copied behind the forwards that are queued.

## What is claimed, and not yet seen on a GPU

The pretended device promised this of a real one. On a machine that has one, `python -m
benchmarks.gpu_page check waits` holds each claim against it, and says which was wrong.

{{claims}}

## Where the host waits

A pipeline that reads a number from the device, or copies one to it from ordinary memory, waits
until all that was queued is done. Such waits cost nothing but time; the engine makes none at a
step, and what pipelines and schedulers make on the host it copies through pinned memory. They
were counted on a pretended device (real values under another device's label,
`tests/support/pretended`): two requests of six steps share their forwards, and give the same
pictures as on a CPU. A row counts the waits of one of them, at each step and in all, by whose
code it is: the engine, the scheduler or the pipeline (diffusers {diffusers.__version__}), or a
model (diffusers, transformers). The last column names those of a step. Rows are those of
[models.md](models.md), one task of each family; Helios Mid and Distilled, whose steps come in
stages, were not counted.

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

    known = {one.name: one for one in CASES}
    lines = []
    for name in FIRST:
        if known[name].needs_torchvision and not torchvision_cpu.IS_THERE:
            raise SystemExit(f"{name} needs torchvision: `make build/torchvision`")
        lines.append(row(name, measure(name)))
        sys.stdout.write(lines[-1] + "\n")
    PAGE.write_text(head() + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
