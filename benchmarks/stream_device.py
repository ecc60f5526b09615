"""Streamed weights on an accelerator: its own bus, a shared sweep, one by one, diffusers' offload.

usage: make gpu-page      (or: python -m benchmarks.stream_device --device cuda)

Eight request-steps of three sizes through blocks of FLUX.1-dev's shapes with random weights, fewer
of them (4 and 8, of 19 and 38), in bfloat16. All blocks are streamed from pinned memory. *Copying
once* is what the device says that its copies take; *of the bound* the longer of that and of
computing the steps with resident weights, fused by size.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading
from torch import Tensor

from benchmarks.stream import Way
from carpool.config import EngineSettings
from carpool.engine.adapters.hooks import Adapters
from carpool.engine.sweep import Sweeps
from carpool.engine.weights.placement import place
from carpool.engine.weights.streaming import Streamer

HAS_STREAMS = ("cuda", "xpu")  # as diffusers' group offload asks for
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of the largest value


@dataclass(frozen=True)
class Rig:
    """What is measured, and where."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    blocks: tuple[int, int] = (4, 8)  # double and single
    heads: int = 24
    head_width: int = 128
    axes: tuple[int, int, int] = (16, 56, 56)
    text: tuple[int, int] = (512, 4096)  # tokens and their width
    sides: dict[int, int] = field(default_factory=lambda: {32: 3, 48: 3, 64: 2})  # tokens: requests

    def model(self) -> Any:
        torch.manual_seed(0)
        config = {
            "in_channels": 64,
            "num_layers": self.blocks[0],
            "num_single_layers": self.blocks[1],
            "attention_head_dim": self.head_width,
            "num_attention_heads": self.heads,
            "joint_attention_dim": self.text[1],
            "pooled_projection_dim": 64,
            "axes_dims_rope": self.axes,
        }
        return FluxTransformer2DModel(**config).to(self.dtype).eval().requires_grad_(False)

    def call(self, side: int, rows: int) -> dict[str, Any]:
        """Arguments of a forward of so many requests of one size."""
        chance, places = torch.Generator().manual_seed(side), torch.arange(side * side)
        ids = torch.stack([torch.zeros(side * side), places // side, places % side], dim=1)
        tokens, width = self.text
        given: dict[str, Tensor] = {
            "hidden_states": torch.randn(rows, side * side, 64, generator=chance),
            "encoder_hidden_states": torch.randn(rows, tokens, width, generator=chance),
            "pooled_projections": torch.randn(rows, 64, generator=chance),
            "timestep": torch.rand(rows, generator=chance),
            "txt_ids": torch.zeros(tokens, 3),
            "img_ids": ids,
        }
        there = {name: one.to(self.device, self.dtype) for name, one in given.items()}
        return {**there, "return_dict": False}

    def settle(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def tiny(device: torch.device) -> Rig:
    """A rig that says whether everything runs, and nothing of how fast."""
    return Rig(
        device, torch.float32, blocks=(1, 2), heads=2, head_width=16, axes=(4, 6, 6), text=(8, 32),
        sides={4: 2, 6: 1},
    )  # fmt: skip


def measure(rig: Rig, rounds: int) -> Iterator[str]:
    """The page, by lines."""
    fused = [rig.call(side, rows) for side, rows in rig.sides.items()]
    single = [rig.call(side, 1) for side, rows in rig.sides.items() for _ in range(rows)]
    steps, found = len(single), dict[str, list[tuple[float, float]]]()
    expected, compute_s = _resident(rig, fused, rounds)
    stream_s, n_bytes = 0.0, 0
    for way, stop, seconds_a_sweep in _ways(rig, fused, single):
        answers, _ = _timed(rig, way.run, 1)  # warm; and right
        if way.name.startswith("one sweep"):
            _check(way.name, answers, expected)
        before = way.moved()
        _, seconds = _timed(rig, way.run, rounds)
        found[way.name] = [(seconds, (way.moved() - before) / rounds / steps)]
        if not stream_s:
            stream_s, n_bytes = seconds_a_sweep()
        stop()
    bound_s = max(stream_s, compute_s)
    yield f"{n_bytes / 2**30:.2f} GiB of blocks, {steps} request-steps, three sizes; medians of"
    yield f"{rounds} rounds. Copying once takes {stream_s:.3f} s, computing {compute_s:.3f} s.\n"
    yield "| way | seconds | steps/s | of the bound | GiB a request-step |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, [(seconds, moved)] in found.items():
        yield (
            f"| {name} | {seconds:.3f} | {steps / seconds:.2f} | {bound_s / seconds:.2f} "
            f"| {moved / 2**30:.2f} |"
        )


def _ways(
    rig: Rig, fused: list[dict[str, Any]], single: list[dict[str, Any]]
) -> Iterator[tuple[Way, Callable[[], object], Callable[[], tuple[float, int]]]]:
    """Each way, what ends it, and the seconds and bytes of copying all blocks once."""
    for name, calls, is_shared in (
        ("one sweep for all", fused, True),
        ("one sweep for each size", fused, False),
        ("one by one", single, False),
    ):
        model = rig.model()
        settings = EngineSettings(device=str(rig.device), stream="transformer")
        streamer = place({"transformer": model}, rig.device, settings, None)
        assert streamer is not None, "all blocks were asked for"
        sweeps = Sweeps(streamer, Adapters(object(), rig.device), time.monotonic)
        bodies = [partial(_first, model, one) for one in calls]
        sets = [bodies] if is_shared else [[body] for body in bodies]
        yield (
            Way(
                name, partial(_sweeps, sweeps, sets), partial(getattr, streamer.bus, "moved_bytes")
            ),
            streamer.remove,
            partial(_copies, streamer),
        )
    model = rig.model()
    apply_group_offloading(
        model,
        onload_device=rig.device,
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=rig.device.type in HAS_STREAMS,
    )
    n_bytes = sum(weight.nbytes for weight in model.parameters())
    runs = [0]

    def theirs() -> list[Tensor]:
        runs[0] += len(single)
        return [model(**one)[0] for one in single]

    yield (
        Way("diffusers, one by one", theirs, lambda: runs[0] * n_bytes),
        lambda: None,
        lambda: (0.0, n_bytes),
    )


def _resident(rig: Rig, fused: list[dict[str, Any]], rounds: int) -> tuple[list[Tensor], float]:
    """Answers and seconds with all weights on the device, which are gone afterwards."""
    model = rig.model().to(rig.device)
    return _timed(rig, lambda: [model(**one)[0] for one in fused], rounds)


def _first(model: Any, given: dict[str, Any]) -> Tensor:
    answer: Tensor = model(**given)[0]
    return answer


def _sweeps(sweeps: Sweeps, sets: Sequence[Sequence[Callable[[], Tensor]]]) -> list[Tensor]:
    return [answer for one in sets for answer in sweeps.run(one)]


def _copies(streamer: Streamer) -> tuple[float, int]:
    return streamer.seconds_of("transformer"), streamer.bytes_of("transformer")


def _timed(rig: Rig, run: Callable[[], list[Tensor]], rounds: int) -> tuple[list[Tensor], float]:
    seconds = []
    for _ in range(rounds):
        rig.settle()
        began_s = time.monotonic()
        answers = run()
        rig.settle()
        seconds.append(time.monotonic() - began_s)
    return answers, statistics.median(seconds)


def _check(name: str, answers: list[Tensor], expected: list[Tensor]) -> None:
    for mine, wanted in zip(answers, expected, strict=True):
        gap = float((mine - wanted).abs().max() / wanted.abs().max())
        if not gap <= CLOSE[wanted.dtype]:
            raise SystemExit(f"{name} gives other answers than resident weights: {gap:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, xpu, mps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a few small blocks: does it run?")
    options = parser.parse_args()
    here = torch.accelerator.current_accelerator()
    if options.device == "auto" and (here is None or not torch.accelerator.is_available()):
        sys.exit("there is no accelerator here; `make bench-stream` emulates a bus on a CPU")
    torch.set_grad_enabled(False)
    device = torch.device(str(here) if options.device == "auto" else options.device)
    for line in measure(tiny(device) if options.tiny else Rig(device), options.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
