"""Pictures beside the prompt: ControlNets for Stable Diffusion XL and FLUX, and an IP-adapter."""

import math

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from support.matrix.case import Case
from support.matrix.stable import EMBEDDED, GUIDED, PICTURES

_EYES_WIDTH = 32
_ADAPTER_TOKENS = 4


def adapter(unet: diffusers.UNet2DConditionModel) -> dict[str, dict[str, Tensor]]:
    """Draw an IP-adapter for `unet`, as `load_ip_adapter` takes it; the same every time."""
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) / math.sqrt(columns)

    width = unet.config.cross_attention_dim
    attentions = [name for name in unet.attn_processors if ".attn2." in name]
    weights = {}
    for number, name in enumerate(attentions):
        keys = unet.get_submodule(name.removesuffix(".processor")).to_k.weight
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * number + 1}.{part}.weight"] = matrix(*keys.shape)
    return {
        "image_proj": {
            "proj.weight": matrix(_ADAPTER_TOKENS * width, _EYES_WIDTH),
            "proj.bias": torch.zeros(_ADAPTER_TOKENS * width),
            "norm.weight": torch.ones(width),
            "norm.bias": torch.zeros(width),
        },
        "ip_adapter": weights,
    }


def with_adapter(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Load the tiny IP-adapter."""
    pipe.load_ip_adapter(adapter(pipe.unet), subfolder="", weight_name="")
    return pipe


_EMBEDS = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(5))
"""What the adapter's eyes might say of nothing and of a picture."""

CASES = [
    Case(
        name="sdxl-controlnet",
        family="sdxl_control",
        task="controlnet",
        requests=(
            {**GUIDED[0], "image": PICTURES[0], "controlnet_conditioning_scale": 0.5},
            {**GUIDED[1], "image": PICTURES[1], "controlnet_conditioning_scale": 0.8},
            {**GUIDED[2], "image": PICTURES[2], "controlnet_conditioning_scale": 0.5},
            {**GUIDED[3], "image": PICTURES[3], "controlnet_conditioning_scale": 0.5,
             "guess_mode": True},
        ),
        matters=(
            *("prompt", "seed", "guidance_scale", "negative_prompt"),
            *("image", "controlnet_conditioning_scale"),
        ),
        fuses={
            "text_encoder.forward": 3.0, "text_encoder_2.forward": 3.0,
            "controlnet.forward": 1.3,  # a scale is a number for all rows: each by itself
            "unet.forward": 3.0, "vae.decode": 1.8,
        },
    ),
    Case(
        name="flux-controlnet",
        is_fast=True,
        family="flux_control",
        task="controlnet",
        common={"controlnet_conditioning_scale": 0.7},
        requests=(
            {**EMBEDDED[0], "control_image": PICTURES[0], "control_mode": 0},
            {**EMBEDDED[1], "control_image": PICTURES[1], "control_mode": 1},
            {**EMBEDDED[2], "control_image": PICTURES[2], "control_mode": 2},
            {**EMBEDDED[3], "control_image": PICTURES[3], "control_mode": 0,
             "controlnet_conditioning_scale": 0.4},
        ),
        matters=("prompt", "seed", "guidance_scale", "control_image", "control_mode"),
        fuses={
            "text_encoder.forward": 2.2, "text_encoder_2.forward": 2.2, "controlnet.forward": 2.0,
            "transformer.forward": 2.2, "vae.encode": 1.8, "vae.decode": 1.2,
        },
    ),
    Case(
        name="sdxl-ip-adapter",
        family="sdxl_adapter",
        task="ip-adapter",
        requests=(
            {**GUIDED[0], "ip_adapter_image": PICTURES[0]},
            {**GUIDED[1], "ip_adapter_image": PICTURES[1]},
            {**GUIDED[2], "ip_adapter_image": PICTURES[2]},
            {**GUIDED[3], "ip_adapter_image_embeds": [_EMBEDS]},
        ),
        matters=("prompt", "seed", "guidance_scale", "negative_prompt", "ip_adapter_image"),
        fuses={
            "text_encoder.forward": 3.0, "text_encoder_2.forward": 3.0,
            "image_encoder.forward": 2.2, "unet.forward": 2.3, "vae.decode": 1.8,
        },
        adapt=with_adapter,
    ),
]  # fmt: skip
