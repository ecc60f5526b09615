"""Pictures beside the prompt: ControlNets for Stable Diffusion XL and FLUX, and an IP-adapter."""

import torch
from diffusers import DiffusionPipeline

from support.matrix.case import Case
from support.matrix.stable import EMBEDDED, GUIDED, PICTURES


def with_adapter(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """Load the tiny IP-adapter."""
    from support.tiny.control import adapter

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
            {
                **GUIDED[3],
                "image": PICTURES[3],
                "controlnet_conditioning_scale": 0.5,
                "guess_mode": True,
            },
        ),
        matters=(
            *("prompt", "seed", "guidance_scale", "negative_prompt"),
            *("image", "controlnet_conditioning_scale"),
        ),
        fuses={
            "text_encoder.forward": 3.0,
            "text_encoder_2.forward": 3.0,
            "controlnet.forward": 1.3,  # a scale is a number for all rows: each by itself
            "unet.forward": 3.0,
            "vae.decode": 1.8,
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
            {
                **EMBEDDED[3],
                "control_image": PICTURES[3],
                "control_mode": 0,
                "controlnet_conditioning_scale": 0.4,
            },
        ),
        matters=("prompt", "seed", "guidance_scale", "control_image", "control_mode"),
        fuses={
            "text_encoder.forward": 2.2,
            "text_encoder_2.forward": 2.2,
            "controlnet.forward": 2.0,
            "transformer.forward": 2.2,
            "vae.encode": 1.8,
            "vae.decode": 1.2,
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
            "text_encoder.forward": 3.0,
            "text_encoder_2.forward": 3.0,
            "image_encoder.forward": 2.2,
            "unet.forward": 2.3,
            "vae.decode": 1.8,
        },
        adapt=with_adapter,
    ),
]
