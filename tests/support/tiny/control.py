"""What rides on the families of `stable`: ControlNets, IP-adapters, and a width that one needs."""

import math
from typing import Any

import diffusers
import torch
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from support.tiny.parts import CLIP_WIDTH, drawn, sharpened
from support.tiny.stable import ARGUMENTS as STABLE
from support.tiny.stable import flux, sd3, sdxl

_EYE_PX = 32
_ADAPTER_TOKENS = 4


def sd3_inpaint() -> diffusers.StableDiffusion3InpaintPipeline:
    """Stable Diffusion 3 with 16 latent channels: its inpainting takes no other number."""
    pipe = sd3()
    vae = diffusers.AutoencoderKL.from_config({**pipe.vae.config, "latent_channels": 16})
    wide = {**pipe.transformer.config, "in_channels": 16, "out_channels": 16}
    transformer = drawn(
        diffusers.SD3Transformer2DModel.from_config(wide), last="proj_out", gain=0.3
    )
    return diffusers.StableDiffusion3InpaintPipeline(**{
        **pipe.components, "vae": drawn(vae, last="decoder.conv_out", gain=0.5),
        "transformer": transformer,
    })  # fmt: skip


def sdxl_control() -> diffusers.StableDiffusionXLControlNetPipeline:
    """Stable Diffusion XL with a ControlNet, whose layers no longer give the zeros of a new one."""
    pipe = sdxl()
    net = diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(4, 8))
    return diffusers.StableDiffusionXLControlNetPipeline(**pipe.components, controlnet=drawn(net))


def flux_control() -> diffusers.FluxControlNetPipeline:
    """Flux.1 with a union of ControlNets: `control_mode` says which of them."""
    pipe = flux()
    net = diffusers.FluxControlNetModel.from_config(
        {**pipe.transformer.config, "num_layers": 2, "num_single_layers": 1, "num_mode": 3}
    )
    return diffusers.FluxControlNetPipeline(**pipe.components, controlnet=sharpened(drawn(net)))


def sdxl_adapter() -> diffusers.StableDiffusionXLPipeline:
    """Stable Diffusion XL with eyes for an IP-adapter; `adapter` has the rest."""
    eyes = CLIPVisionModelWithProjection(CLIPVisionConfig(
        hidden_size=CLIP_WIDTH, intermediate_size=37, projection_dim=CLIP_WIDTH,
        num_hidden_layers=2, num_attention_heads=4, image_size=_EYE_PX, patch_size=8,
    ))  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(**{
        **sdxl().components, "image_encoder": drawn(eyes),
        "feature_extractor": CLIPImageProcessor(size={"shortest_edge": _EYE_PX}, crop_size=_EYE_PX),
    })  # fmt: skip


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
            "proj.weight": matrix(_ADAPTER_TOKENS * width, CLIP_WIDTH),
            "proj.bias": torch.zeros(_ADAPTER_TOKENS * width),
            "norm.weight": torch.ones(width),
            "norm.bias": torch.zeros(width),
        },
        "ip_adapter": weights,
    }


FAMILIES = {
    "sd3_inpaint": sd3_inpaint,
    "sdxl_control": sdxl_control,
    "flux_control": flux_control,
    "sdxl_adapter": sdxl_adapter,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "sd3_inpaint": STABLE["sd3"],
    "sdxl_control": STABLE["sdxl"],
    "flux_control": {**STABLE["flux"], "max_sequence_length": 24},
    "sdxl_adapter": STABLE["sdxl"],
}
