"""Adapters by row: their cost in a forward, against PEFT's mixed batch and grouping.

usage: make bench-lora       (or: OMP_NUM_THREADS=1 python benchmarks/lora.py)

Eight rows of a transformer, one step. *Mixed*: three adapters and no adapter, two rows each. All
variants get equal inputs and weights, and their outputs are compared. Times are medians of turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from carpool.engine.adapters.hooks import Adapters
from carpool.engine.adapters.parts import Part
from carpool.models.embedded import MODEL_DIR
from carpool.request.lora import AdapterScales

ROWS, RANK = 8, 16
NAMES = ("a", "b", "c")
LAYERS = r".*\.(to_q|to_k|to_v|to_out\.0|net\.0\.proj|net\.2|proj_mlp|proj_out)"
MIXED = ["a", "a", "b", "b", "c", "c", "none", "none"]


def large() -> Any:
    """A random FLUX of width 512: 50 million weights."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=8,
        joint_attention_dim=512,
        pooled_projection_dim=96,
        axes_dims_rope=(16, 24, 24),
        guidance_embeds=True,
    )


def inputs(model: Any, image_tokens: int, text_tokens: int) -> dict[str, Tensor]:
    config, chance = model.config, torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(ROWS, image_tokens, config.in_channels, generator=chance),
        "timestep": torch.rand(ROWS, generator=chance),
        "guidance": torch.full((ROWS,), 3.5),
        "pooled_projections": torch.randn(ROWS, config.pooled_projection_dim, generator=chance),
        "encoder_hidden_states": torch.randn(
            ROWS, text_tokens, config.joint_attention_dim, generator=chance
        ),
        "img_ids": torch.zeros(image_tokens, 3),
        "txt_ids": torch.zeros(text_tokens, 3),
    }


def with_peft(model: Any) -> Any:
    """The model with all adapters in PEFT, with random weights."""
    torch.manual_seed(0)
    for name in NAMES:
        model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS), name)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.05)
    return model.eval().requires_grad_(False)


def taken_from(model: Any) -> dict[str, dict[tuple[str, str], Part]]:
    """Convert a model's PEFT adapters to the engine's."""
    layers = [(path, part) for path, part in model.named_modules() if isinstance(part, LoraLayer)]
    return {
        name: {
            ("transformer", path): Part(
                layer.lora_A[name], layer.lora_B[name], layer.scaling[name], torch.float32
            )
            for path, layer in layers
        }
        for name in NAMES
    }


@contextmanager
def peft_rows(model: Any, names: Sequence[str]) -> Iterator[None]:
    """PEFT's mixed batch: every layer gets the adapter names of the rows."""
    rows = ["__base__" if name == "none" else name for name in names]

    def tell(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "adapter_names": rows}

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    hooks = [layer.register_forward_pre_hook(tell, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def ways(
    plain: Any, peft: Any, inputs: dict[str, Tensor]
) -> dict[str, tuple[str, Callable[[], Tensor]]]:
    """All variants of the eight rows, each with the variant whose output it must equal."""

    def run(model: Any, rows: slice = slice(None)) -> Tensor:
        part = {n: v if n.endswith("_ids") else v[rows] for n, v in inputs.items()}
        answer: Tensor = model(**part, return_dict=False)[0]
        return answer

    pipe: Any = SimpleNamespace(transformer=plain)
    adapters = Adapters(pipe, torch.device("cpu"))
    for name, parts in taken_from(peft).items():
        adapters._arrived.append((name, parts))

    def ours(names: Sequence[str], rows: slice = slice(None)) -> Tensor:
        loras: list[AdapterScales] = [() if name == "none" else ((name, 1.0),) for name in names]
        calls: Any = [SimpleNamespace(lora=lora, arguments=dict) for lora in loras]
        with adapters.applied(calls, [1] * len(calls)):
            return run(plain, rows)

    def grouped() -> Tensor:
        return torch.cat([ours(MIXED[i : i + 2], slice(i, i + 2)) for i in range(0, ROWS, 2)])

    def peft_mixed(names: Sequence[str]) -> Tensor:
        with peft_rows(peft, names):
            return run(peft)

    def peft_uniform() -> Tensor:
        peft.enable_adapters()
        peft.set_adapter("a")
        return run(peft)

    return {
        "no adapter registered": ("", lambda: run(plain)),
        "registered, not used": ("no adapter registered", lambda: ours(["none"] * 8)),
        "one adapter for all: PEFT": ("", peft_uniform),
        "one adapter for all: ours": ("one adapter for all: PEFT", lambda: ours(["a"] * 8)),
        "mixed: PEFT's mixed batch": ("", lambda: peft_mixed(MIXED)),
        "mixed: ours": ("mixed: PEFT's mixed batch", lambda: ours(MIXED)),
        "mixed, rows in bad order: ours": ("", lambda: ours(MIXED[::2] + MIXED[1::2])),
        "mixed: grouped, four forwards": ("mixed: PEFT's mixed batch", grouped),
    }


def table(name: str, plain: Any, peft: Any, inputs: dict[str, Tensor], turns: int) -> str:
    todo = ways(plain, peft, inputs)
    times: dict[str, list[float]] = {way: [] for way in todo}
    answers: dict[str, Tensor] = {}
    for turn in range(turns + 1):
        for way, (_, run) in todo.items():
            began_s = time.perf_counter()
            answers[way] = run()
            if turn:  # the first turn is a warm-up
                times[way].append(time.perf_counter() - began_s)
    lines = [f"| {name} | ms | of the first |", "| --- | ---: | ---: |"]
    for way, (baseline, _) in todo.items():
        if baseline:
            expected = answers[baseline]
            far = float((answers[way] - expected).abs().max() / expected.abs().max())
            assert far < 1e-4, f"{way} differs from {baseline} by {far:.1e}"
        first = times["no adapter registered"]
        ratio = statistics.median(a / b for a, b in zip(times[way], first, strict=True))
        lines.append(f"| {way} | {statistics.median(times[way]) * 1e3:.1f} | {ratio:.2f} |")
    return "\n".join(lines)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()

    def shapes() -> Any:
        folder = MODEL_DIR / "transformer"
        return FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float32)

    kinds: dict[str, tuple[Callable[[], Any], int, int, int]] = {
        "`shapes`, 4 M weights, 32 tokens": (shapes, 16, 16, 4 * options.turns),
        "FLUX of width 512, 256 tokens": (large, 192, 64, max(3, options.turns // 3)),
    }
    for name, (build, image_tokens, text_tokens, turns) in kinds.items():
        plain, twin = build().eval().requires_grad_(False), build()
        twin.load_state_dict(plain.state_dict())
        peft = with_peft(twin)
        print(table(name, plain, peft, inputs(plain, image_tokens, text_tokens), turns), "\n")


if __name__ == "__main__":
    main()
