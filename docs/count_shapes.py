"""What Hunyuan3D-2 takes, counted with its own package without weights: for `carpool plan`.

usage: PYTHONPATH=build/mesh:tests python docs/count_shapes.py    (writes `counted.json`)
"""

import json
from dataclasses import asdict
from importlib import import_module
from math import ceil
from typing import Any

import torch

from carpool_lab.plan.names import COUNTED
from carpool_lab.plan.work import META, CallGroup, Work, work_of
from support import torchvision_cpu

POINTS, RESOLUTION, TOKENS = 8000, 384, 1 + (518 // 14) ** 2


def counted(components: dict[str, Any], steps: int) -> dict[str, Any]:
    """Weights by component, and the calls of one request of the usual settings."""
    with META:
        parts = {
            name: getattr(import_module(f"hy3dgen.shapegen.{module}"), cls)(**params)
            for name, (module, cls, params) in components.items()
        }
    for part in parts.values():
        part.to(torch.bfloat16).eval()

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    def call(
        name: str, method: str, calls: int, *tensors: torch.Tensor, rows: int = 1, **more: Any
    ) -> CallGroup:
        run = parts[name] if method == "forward" else getattr(parts[name], method)
        return CallGroup(name, method, rows, work_of(run, tensors, more)[1], calls)

    model, vae, conditioner = (components[name][2] for name in ("model", "vae", "conditioner"))
    is_distilled = model.get("guidance_embed", False)
    rows, latents = 1 if is_distilled else 2, (vae["num_latents"], vae["embed_dim"])
    picture = {"main": empty(rows, TOKENS, model["context_in_dim"])}
    guidance = empty(rows) if is_distilled else None
    chunk: dict[str, Any] = {
        "queries": empty(1, POINTS, 3),
        "latents": empty(1, latents[0], vae["width"]),
    }
    chunks = ceil((RESOLUTION + 1) ** 3 / POINTS)
    size = conditioner["main_image_encoder"]["kwargs"]["image_size"]
    parts["conditioner"] = parts["conditioner"].main_image_encoder.model
    groups = [
        call("conditioner", "forward", 1, empty(1, 3, size, size)),
        call("model", "forward", steps, empty(rows, *latents), empty(rows), rows=rows,
             contexts=picture, guidance=guidance),
        call("vae", "forward", 1, empty(1, *latents)),
        call("vae", "geo_decoder", chunks, **chunk),
    ]  # fmt: skip
    return {
        "parameters": {n: sum(p.numel() for p in part.parameters()) for n, part in parts.items()},
        "calls": [asdict(group) | {"work": _work(group.work)} for group in groups],
    }


def _work(work: Work) -> dict[str, Any]:
    return asdict(work) | {"products": [[*mnk, n] for mnk, n in work.products.items()]}


if __name__ == "__main__":
    torchvision_cpu.install()
    models = json.loads(COUNTED.read_text())
    for data in models.values():
        data["counted"] = counted(data["components"], data["call"]["num_inference_steps"])
    lines = (f"{json.dumps(name)}: {json.dumps(data)}" for name, data in models.items())
    COUNTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
