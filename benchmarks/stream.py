"""Streamed weights: a shared sweep, sweeps one by one, and diffusers' own group offload.

usage: make bench-stream      (or: OMP_NUM_THREADS=1 python -m benchmarks.stream --output PAGE)

Eight request-steps of three sizes through a FLUX transformer whose blocks are streamed from a file.
On a CPU the bus is emulated: every load of a block is held to a bandwidth, chosen so that copying
all blocks once takes a quarter of computing the eight steps, as long, and four times as long. What
is measured is whether copies and computation overlap, and how often weights move; not a device.
Diffusers' way has no streams on a CPU, so its copies do not overlap what it computes. Where a part
of the blocks stays, it is what `--memory` would keep; "copying once" is then of the others.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import GroupOffloadingHook
from torch import Tensor

from benchmarks import stream_held
from benchmarks.stream_bus import HeldBus, hold
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.sweep import Sweeps
from carpool.engine.weights.backing_store import DiskStore
from carpool.engine.weights.groups import blocks_of
from carpool.engine.weights.placement import components_of
from carpool.engine.weights.residency import SLOTS, plan
from carpool.engine.weights.streaming import Streamer

CPU = torch.device("cpu")
SIDES = {8: 3, 12: 3, 16: 2}  # requests by latent side
STEPS = sum(SIDES.values())
IN_A_ROW = 3  # consecutive turns of variants that share sweeps
WIDTH_TEXT, TOKENS = 64, 32
SHARES = (0.25, 1.0, 4.0)  # copying all blocks once, relative to computing


@dataclass(frozen=True)
class Way:
    """A variant of computing the eight steps."""

    name: str
    run: Callable[[], list[Tensor]]  # computes all steps once
    moved: Callable[[], int]  # bytes moved so far
    streamed_bytes: int = 0  # bytes of a sweep, if measured
    settle: Callable[[], object] = lambda: None  # waits for running loads


def transformer() -> Any:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=8,
        joint_attention_dim=WIDTH_TEXT,
        pooled_projection_dim=WIDTH_TEXT,
        axes_dims_rope=(8, 12, 12),
    ).eval().requires_grad_(False)  # fmt: skip


def call(side: int, rows: int) -> dict[str, Any]:
    """Arguments of a forward with `rows` requests of one size."""
    chance = torch.Generator().manual_seed(side)
    places = torch.arange(side * side)
    ids = torch.stack([torch.zeros(side * side), places // side, places % side], dim=1)
    return {
        "hidden_states": torch.randn(rows, side * side, 16, generator=chance),
        "encoder_hidden_states": torch.randn(rows, TOKENS, WIDTH_TEXT, generator=chance),
        "pooled_projections": torch.randn(rows, WIDTH_TEXT, generator=chance),
        "timestep": torch.rand(rows, generator=chance),
        "txt_ids": torch.zeros(TOKENS, 3),
        "img_ids": ids,
        "return_dict": False,
    }


def _row(fused: dict[str, Any], number: int) -> dict[str, Any]:
    """The arguments of one request in a forward."""
    own_names = {"hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"}
    return {n: v[number : number + 1] if n in own_names else v for n, v in fused.items()}


def ways(folder: Path) -> Iterator[tuple[Way, Callable[[float], None]]]:
    """Yield each variant with a function that sets its bandwidth."""
    fused = [call(side, rows) for side, rows in SIDES.items()]
    single = [_row(kwargs, i) for kwargs in fused for i in range(len(kwargs["timestep"]))]

    for name, calls, is_shared, share in (
        ("one sweep for all", fused, True, 0.0),
        ("one sweep for all, 40 % stays", fused, True, 0.4),
        ("one sweep for each size", fused, False, 0.0),
        ("one by one", single, False, 0.0),
    ):
        model = transformer()
        bus = HeldBus(DiskStore(folder, 1), CPU)
        places = {"transformer": _chosen(model, share)}
        streamer = Streamer({"transformer": model}, places, CPU, bus)
        sweeps = Sweeps(streamer, Adapters(object(), CPU), time.monotonic)
        n_bytes = streamer.bytes_of("transformer")
        run = _runner(sweeps, model, calls, is_shared)
        yield Way(name, run, bus.moved, n_bytes, bus.settle), bus.hold_to
    yield _diffusers(folder / "groups", single)


def _chosen(model: Any, share: float) -> list[str]:
    """Paths of the streamed blocks if a share of their bytes may stay resident."""
    [component] = components_of({"transformer": model})
    sizes = component.blocks_bytes
    if not share:
        return list(blocks_of(model))
    budget = component.fixed_bytes + int(share * sum(sizes)) + SLOTS * max(sizes)
    streamed = plan([component], "auto", budget).streamed["transformer"]
    return [path for i, path in enumerate(blocks_of(model)) if i in streamed]


def _runner(
    sweeps: Sweeps,
    model: Any,
    calls: Sequence[dict[str, Any]],
    is_shared: bool,
) -> Callable[[], list[Tensor]]:
    bodies = [lambda kwargs=kwargs: model(**kwargs)[0] for kwargs in calls]
    sets = [bodies] if is_shared else [[body] for body in bodies]

    def run() -> list[Tensor]:
        return [answer for sweep in sets for answer in sweeps.run(sweep)]

    return run


def _diffusers(
    folder: Path, calls: Sequence[dict[str, Any]]
) -> tuple[Way, Callable[[float], None]]:
    """Diffusers' group offload to the disk, by block, with equally limited loads."""
    model, speed, moved = transformer(), [float("inf")], [0]
    blocks = {id(block) for block in blocks_of(model).values()}
    apply_group_offloading(
        model,
        onload_device=CPU,
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(folder),
    )
    for part in model.modules():
        registry = getattr(part, "_diffusers_hook", None)
        hook = registry.get_hook("group_offloading") if registry is not None else None
        if isinstance(hook, GroupOffloadingHook) and id(part) in blocks:
            hook.group.onload_ = _held(hook.group, part, speed, moved)
    n_bytes = sum(w.nbytes for part in blocks_of(model).values() for w in part.parameters())

    def run() -> list[Tensor]:
        return [model(**kwargs)[0] for kwargs in calls]

    way = Way("diffusers, one by one", run, lambda: moved[0], n_bytes)
    return way, lambda bytes_per_s: speed.__setitem__(0, bytes_per_s)


def _held(group: Any, block: Any, speed: list[float], moved: list[int]) -> Callable[[], None]:
    n_bytes, onload = sum(weight.nbytes for weight in block.parameters()), group.onload_

    def onload_() -> None:
        began_s = time.monotonic()
        onload()
        moved[0] += n_bytes
        hold(began_s, n_bytes / speed[0])

    return onload_


def measure(rounds: int) -> Iterator[str]:
    """The page, by lines."""
    resident = transformer()
    fused = [call(side, rows) for side, rows in SIDES.items()]
    n_bytes = sum(
        weight.nbytes for block in blocks_of(resident).values() for weight in block.parameters()
    )

    def timed(run: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
        began_s = time.monotonic()
        answers = run()
        return time.monotonic() - began_s, answers

    def together() -> list[Tensor]:
        return [resident(**kwargs)[0] for kwargs in fused]

    expected = timed(together)[1]
    with tempfile.TemporaryDirectory() as folder:
        ways_here = list(ways(Path(folder)))
        for way, _ in ways_here:
            rows = [row for answer in way.run() for row in answer]  # warm-up and check
            targets = [row for answer in expected for row in answer]
            close = [torch.allclose(*pair, atol=1e-5) for pair in zip(rows, targets, strict=True)]
            if not all(close):
                raise SystemExit(f"{way.name} gives other answers than resident weights")
        yield f"Blocks of {n_bytes / 2**20:.0f} MiB, {STEPS} request-steps, three sizes; medians"
        yield f"of {rounds} round(s). *Of the bound*: the longer of copying once and computing the"
        yield "steps resident, fused by size, just before; 1 is the best there can be.\n"
        yield "| copying once | way | seconds | steps/s | of the bound | MiB a request-step |"
        yield "| --- | --- | ---: | ---: | ---: | ---: |"
        for share in SHARES:
            samples: dict[str, list[tuple[float, float, float]]] = {}
            for _ in range(rounds):
                for way, set_speed in ways_here:
                    compute_s = timed(together)[0]
                    stream_s = share * compute_s
                    set_speed(way.streamed_bytes / stream_s)
                    turns = IN_A_ROW if way.name.startswith("one sweep") else 1
                    if turns > 1:
                        way.run()  # loads continue across sweeps
                    before = way.moved()
                    seconds = sum(timed(way.run)[0] for _ in range(turns)) / turns
                    bound = max(stream_s, compute_s) / seconds
                    moved = (way.moved() - before) / STEPS / turns
                    way.settle()
                    samples.setdefault(way.name, []).append((seconds, bound, moved))
            for name, runs in samples.items():
                seconds, bound, moved = map(statistics.median, zip(*runs, strict=True))
                yield (
                    f"| {share:g} x computing | {name} | {seconds:.2f} | {STEPS / seconds:.2f} "
                    f"| {bound:.2f} | {moved / 2**20:.1f} |"
                )


def _page(rounds: int) -> Iterator[str]:
    yield from measure(rounds)
    yield "\n## Blocks of real models, held to seconds\n"
    yield (stream_held.__doc__ or "").split("\n\n", 1)[1]
    with tempfile.TemporaryDirectory() as folder:
        yield from stream_held.measure(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    head = ["# Streamed weights, measured\n", *(__doc__ or "").split("\n\n", 2)[2:]]
    text = ["Made by `make bench-stream`; do not edit.\n"]
    for line in _page(arguments.rounds):
        print(line, flush=True)
        text.append(line)
    text.append(f"\ntorch {torch.__version__}, one thread of a CPU.")
    if arguments.output:
        arguments.output.write_text("\n".join([*head, *text]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
