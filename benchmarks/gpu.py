"""Real-size models on a GPU, with random weights: what sharing forwards gains, and what it costs.

usage: make bench-gpu          (or: python -m benchmarks.gpu --only flux,sdxl --output PAGE.md)

Parts, for each model and size; one that would not fit into what is left of the time is left out,
and says so. Everything is written as soon as it is measured.

- *curve*: seconds of one forward of the denoiser by its rows, without an engine; the share of the
  machine's largest matrix product that it reaches; the knee, behind which wider hardly gains.
- *eager*: requests with mixed steps, all sent at once, through the engine in each batching mode.
  `loop us` and `pipeline us` are the engine's own time and that of the pipelines' code, a forward;
  `late` and `waited` say whether the device waited for them between forwards (see `gpu_engine.py`).
- *kernels*: of a short stretch in `continuous`, the share in which any kernel ran.
- *likeness*: PSNR of pictures made together against the same alone.
- *compiled*: as *eager* and *kernels*, its repeated blocks compiled, as `--compile` does.
"""

import argparse
import faulthandler
import gc
import sys
from importlib import metadata
from pathlib import Path
from typing import get_args

import torch

from benchmarks.gpu_clock import Deadline, Marks, matmul_tflops
from benchmarks.gpu_models import MODELS, Model
from benchmarks.gpu_page import Report
from benchmarks.gpu_parts import Bench, built, parts
from benchmarks.gpu_report import Machine, Missing
from benchmarks.gpu_tiny import tiny
from carpool.config import BatchingMode

PARTS = ("curve", "eager", "kernels", "likeness", "compiled")
MODES = ("off", "dynamic", "continuous")
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
GRACE_S = 60.0  # after the budget; then whatever hangs says where, and ends


def measure(bench: Bench, model: Model, deadline: Deadline) -> None:
    """All parts of one model that were asked for and fit into the time."""
    one = built(bench, model)
    for part in parts(one):
        if part.name.split()[0] not in bench.parts:
            continue
        if part.needs_s() > deadline.left_s:
            why = f"needs about {part.needs_s():.0f} s, {max(0, deadline.left_s):.0f} s are left"
            bench.report.add(Missing(model.title, part.name, why))
            continue
        try:
            if record := part.work(deadline):
                bench.report.add(record)
        except Exception as error:  # the next part may well be measured
            bench.report.add(missing(model, part.name, error))


def missing(model: Model, part: str, error: Exception) -> Missing:
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return Missing(model.title, part, why[:200])


def forget(marks: Marks) -> None:
    """Give a model's memory back, its compiled code included."""
    torch.compiler.reset()
    gc.collect()
    if marks.is_cuda:
        torch.cuda.empty_cache()
        print(f"{torch.cuda.memory_allocated() / 2**30:.2f} GiB stay in use", file=sys.stderr)


def machine(device: torch.device, tflops: float) -> Machine:
    is_cuda = device.type == "cuda"
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "diffusers")]
    return Machine(
        device=torch.cuda.get_device_name(device) if is_cuda else "a CPU, tiny models: a test",
        versions=", ".join([*versions, f"Python {sys.version.split()[0]}"]),
        tflops=tflops,
        command=" ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
    )


def bench_of(options: argparse.Namespace) -> Bench:
    """Measure the machine itself, and say how its models are to be measured."""
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --tiny tests this program on a CPU")
    device = torch.device("cpu" if options.tiny else "cuda:0")
    marks, dtype = Marks(device), torch.float32 if options.tiny else torch.bfloat16
    report = Report(options.output)
    tflops = matmul_tflops(marks, 256 if options.tiny else 8192, dtype)
    report.add(machine(device, tflops))
    known = get_args(BatchingMode)
    for mode in options.modes:
        if mode not in known:
            report.add(Missing("all", f"mode {mode}", f"this carpool has {', '.join(known)}"))
    return Bench(
        marks=marks,
        dtype=dtype,
        report=report,
        tflops=tflops,
        parts=options.parts,
        modes=tuple(mode for mode in options.modes if mode in known),
        sizes=options.sizes,
        requests=4 if options.tiny else options.requests,
        rows=ROWS[:2] if options.tiny else ROWS,
        max_batch_size=options.max_batch_size,
        compiler={"backend": "eager"} if options.tiny else {},
    )


def listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=listed, default=tuple(MODELS), help=", ".join(MODELS))
    parser.add_argument("--parts", type=listed, default=PARTS, help=", ".join(PARTS))
    parser.add_argument("--modes", type=listed, default=MODES, help=", ".join(MODES))
    parser.add_argument("--sizes", type=listed, default=(), help="as 512x512; default: all")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-batch-size", type=int, default=8, help="of the engine, rows")
    parser.add_argument("--budget-s", type=float, default=500.0, help="begin no part after that")
    parser.add_argument("--output", type=Path, help="the page; its records go beside it, as .jsonl")
    parser.add_argument("--tiny", action="store_true", help="a test on a CPU, of tiny models")
    options = parser.parse_args()
    for name in ("only", "parts"):
        allowed = tuple(MODELS) if name == "only" else PARTS
        if unknown := set(getattr(options, name)) - set(allowed):
            parser.error(f"--{name}: {', '.join(sorted(unknown))}: must be of {', '.join(allowed)}")
    return options


def main() -> None:
    options = arguments()
    faulthandler.dump_traceback_later(options.budget_s + GRACE_S, exit=True)
    deadline = Deadline.after(options.budget_s)
    bench = bench_of(options)
    for i, name in enumerate(options.only):
        model = tiny(name) if options.tiny else MODELS[name]
        try:
            measure(bench, model, deadline.share(len(options.only) - i))
        except Exception as error:  # it could not even be built
            bench.report.add(missing(model, "all", error))
        forget(bench.marks)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
