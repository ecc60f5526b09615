"""Small FLUX and Qwen-Image with random weights, in process, and 16 mixed requests for each."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import carpool
from benchmarks.gpu_build import filled, pipeline_of, request, weightless
from benchmarks.gpu_models import Model
from benchmarks.gpu_tiny import tiny

CLIENTS, STEPS = 16, (6, 9, 14, 20)
STRENGTHS = (1.0, 0.75, 1.25)  # of guidance
WIDER: Mapping[str, Mapping[str, Any]] = {  # so that a forward takes some ms, as on a device
    "flux": {
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "axes_dims_rope": (8, 12, 12),
    },
    "qwen-image": {
        "num_layers": 3,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "axes_dims_rope": (8, 12, 12),
    },
}


def model_of(name: str) -> Model:
    """A tiny model of the GPU's benchmark, with a larger denoiser."""
    small = tiny(name)
    denoiser, config = small.denoiser
    return replace(small, denoiser=(denoiser, {**config, **WIDER[name]}))


def loaded(name: str) -> Any:
    """A pipeline with random weights, for `carpool.load`."""
    model, cpu = model_of(name), torch.device("cpu")
    modules = (filled(weightless(part), cpu, torch.float32) for part in (model.denoiser, model.vae))
    return pipeline_of(model, *modules)


def requests(name: str) -> list[carpool.Request]:
    """Requests of mixed steps and guidance, the same each time."""
    model, cpu = model_of(name), torch.device("cpu")
    [size] = model.sizes
    burst = []
    for n in range(CLIENTS):
        strength = STRENGTHS[n % len(STRENGTHS)]
        guided = {key: value * strength for key, value in model.guided.items()}
        changed, steps = replace(model, guided=guided), STEPS[n % len(STEPS)]
        burst.append(request(changed, size, steps, cpu, seed=n, dtype=torch.float32))
    return burst
