"""Wan with sparse attention and few steps: FastWan 2.1, TurboWan 2.1 and 2.2."""

from typing import Any

import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from torch import nn

from carpool.engine.model.dmd import DMDScheduler
from carpool.engine.model.sparse_wan import SparseLinearWanTransformer, VideoSparseWanTransformer
from carpool.engine.model.turbo_wan import with_sampler
from support.matrix.case import Case
from support.matrix.wan import CAT, IMAGES, LONG, with_images, without_ftfy
from support.tiny.parts import drawn

GRID: dict[str, Any] = {"height": 96, "width": 160, "guidance_scale": 1.0}  # 2 x 6 x 10 tokens


def sparse(transformer: WanTransformer3DModel, cls: Any, share: float) -> WanTransformer3DModel:
    """The same weights under a class with sparse attention, with drawn gates or projections."""
    model = cls.from_config(transformer.config)
    missing = model.load_state_dict(transformer.state_dict(), strict=False).missing_keys
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name in sorted({name.rpartition(".")[0] for name in missing}):
            drawn(nn.Sequential(model.get_submodule(name)))
    for block in model.blocks:
        block.attn1.processor.share = share
    return model.eval()


def fast_wan(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """FastWan 2.1: gated cubes, three steps."""
    parts = pipe.components | {
        "transformer": sparse(pipe.transformer, VideoSparseWanTransformer, 0.2),
        "scheduler": DMDScheduler(),
    }
    return type(pipe)(**parts)


def turbo_wan(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """TurboWan: blocks with a linear branch, the sampler of rCM."""
    without_ftfy(pipe)
    turned = {
        name: sparse(module, SparseLinearWanTransformer, 0.5)
        for name, module in pipe.components.items()
        if isinstance(module, WanTransformer3DModel)
    }
    cls, parts = with_sampler(type(pipe), pipe.components | turned)
    return cls(**parts, boundary_ratio=pipe.config.boundary_ratio)


FIRST: dict[str, Any] = {"prompt": CAT, "seed": 1, "num_inference_steps": 3}
SECOND: dict[str, Any] = {"prompt": LONG, "seed": 2, "num_inference_steps": 2}
THIRD: dict[str, Any] = {"prompt": "", "seed": 3, "num_inference_steps": 1}
FOURTH: dict[str, Any] = {"prompt": "the moon", "seed": 4, "num_inference_steps": 3}
FOUR_STEPS: dict[str, Any] = FOURTH | {"num_inference_steps": 4}

CASES = [
    Case(
        name="fastwan21-t2v", is_fast=True, family="wan21_t2v", adapt=fast_wan,
        task="text-to-video", common=GRID, requests=(FIRST, SECOND, THIRD, FOURTH),
        fuses={"text_encoder.forward": 2.0, "transformer.forward": 1.8, "vae.decode": 1.0},
    ),
    Case(
        name="turbowan21-t2v", is_fast=True, family="wan21_t2v", adapt=turbo_wan,
        task="text-to-video", common=GRID, requests=(FIRST, SECOND, THIRD, FOUR_STEPS),
        fuses={"text_encoder.forward": 2.0, "transformer.forward": 1.8, "vae.decode": 1.0},
    ),
    Case(
        name="turbowan22-i2v-a14b", family="wan22_i2v_a14b", adapt=turbo_wan, task="image-to-video",
        common=GRID,
        requests=with_images(
            FIRST | {"num_inference_steps": 4}, SECOND | {"num_inference_steps": 3},
            THIRD | {"last_image": IMAGES[0]}, FOUR_STEPS,
        ),
        matters=("prompt", "seed", "image"),
        fuses={
            "text_encoder.forward": 2.0, "vae.encode": 1.2, "transformer.forward": 1.8,
            "transformer_2.forward": 1.2, "vae.decode": 1.0,
        },
    ),
]  # fmt: skip
