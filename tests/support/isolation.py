"""Pipelines that leave state behind, and a comparison of a pipeline with a fresh one.

The builders give the same weights every time, so that a second pipeline can be the judge of the
first. Each `ARGUMENTS` entry calls its pipeline at the smallest size that shows what it does.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.guiders import AdaptiveProjectedMixGuidance
from diffusers.pipelines.deepfloyd_if import IFSafetyChecker, IFWatermarker
from torch import nn
from transformers import CLIPImageProcessor

from support.tiny.parts import drawn, qwen2_tokenizer, t5, t5_tokenizer
from support.tiny.qwen import qwen_vl
from support.tiny.stable import sd3, sd15, sdxl
from support.tiny.wan import umt5, wan_vae


def build(make: Callable[[], diffusers.DiffusionPipeline]) -> diffusers.DiffusionPipeline:
    """A pipeline with the same weights at every call, quiet and in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = make()
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            component.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pag_sdxl() -> diffusers.StableDiffusionXLPAGPipeline:
    """Perturbed attention: processors are exchanged during a call with `pag_scale` above 0."""
    return diffusers.StableDiffusionXLPAGPipeline(**sdxl().components, pag_applied_layers="mid")


def pag_sd3() -> diffusers.StableDiffusion3PAGPipeline:
    parts = {name: part for name, part in sd3().components.items() if part is not None}
    return diffusers.StableDiffusion3PAGPipeline(**parts, pag_applied_layers="blocks.1")


def control_sd3() -> diffusers.StableDiffusion3ControlNetPipeline:
    """Its VAE's posterior is sampled without the generator: from torch's global numbers."""
    pipe = sd3()
    net = diffusers.SD3ControlNetModel.from_transformer(
        pipe.transformer, num_layers=1, num_extra_conditioning_channels=0
    )
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    return diffusers.StableDiffusion3ControlNetPipeline(**parts, controlnet=drawn(net))


def ddim() -> diffusers.StableDiffusionPipeline:
    """A scheduler whose config the constructors of its sisters would correct."""
    parts = {
        **sd15().components,
        "scheduler": diffusers.DDIMScheduler(clip_sample=True, steps_offset=0),
    }
    pipe = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipe.register_modules(scheduler=diffusers.DDIMScheduler(clip_sample=True, steps_offset=0))
    return pipe


def guided() -> diffusers.HunyuanImagePipeline:
    """A guider that keeps its step and its momentum."""
    return diffusers.HunyuanImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=drawn(
            diffusers.AutoencoderKLHunyuanImage(
                in_channels=3, out_channels=3, latent_channels=4,
                block_out_channels=(32, 64, 64, 64), layers_per_block=1, scaling_factor=0.476986,
                spatial_compression_ratio=8, sample_size=128,
            ),
            last="decoder.conv_out", gain=0.5,
        ),
        text_encoder=qwen_vl(), tokenizer=qwen2_tokenizer(), text_encoder_2=t5(32),
        tokenizer_2=t5_tokenizer(),
        transformer=drawn(
            diffusers.HunyuanImageTransformer2DModel(
                in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8,
                num_layers=1, num_single_layers=1, num_refiner_layers=1, patch_size=(1, 1),
                guidance_embeds=False, text_embed_dim=32, text_embed_2_dim=32, rope_axes_dim=(4, 4),
            ),
            last="proj_out", gain=0.3,
        ),
        guider=AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1),
    )  # fmt: skip


def forcing() -> diffusers.SkyReelsV2DiffusionForcingPipeline:
    """`causal_block_size` is written into the transformer's config."""
    return diffusers.SkyReelsV2DiffusionForcingPipeline(
        tokenizer=t5_tokenizer(), text_encoder=umt5(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0,
        ),
        vae=wan_vae(),
        transformer=drawn(
            diffusers.SkyReelsV2Transformer3DModel(
                patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16,
                out_channels=16, text_dim=umt5().config.d_model, freq_dim=256, ffn_dim=32,
                num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
                rope_max_seq_len=32,
            ),
            last="proj_out", gain=0.3,
        ),
    )  # fmt: skip


class Checker(IFSafetyChecker):  # type: ignore[misc]
    """Finds every picture unsafe, and says so by painting it black."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, clip_input: Any, images: Any, **_: Any) -> Any:
        return np.zeros_like(images), [True] * len(images), [False] * len(images)


def pixels() -> diffusers.IFPipeline:
    """DeepFloyd IF: rescales, checks and marks its pictures for "pil" and "np", not for "pt"."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=32, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), in_channels=3,
        out_channels=6, cross_attention_dim=32, encoder_hid_dim=32, attention_head_dim=8,
        addition_embed_type="text", addition_embed_type_num_heads=2,
        cross_attention_norm="group_norm", resnet_time_scale_shift="scale_shift", act_fn="gelu",
    )  # fmt: skip
    pipe = diffusers.IFPipeline(
        text_encoder=t5(32), tokenizer=t5_tokenizer(), unet=drawn(unet, last="conv_out", gain=0.3),
        scheduler=diffusers.DDPMScheduler(
            beta_schedule="squaredcos_cap_v2", thresholding=True, variance_type="learned_range",
        ),
        watermarker=IFWatermarker(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    reader = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    vars(pipe).update(safety_checker=Checker(), feature_extractor=reader)
    return pipe


def two_controls() -> diffusers.StableDiffusionXLControlNetPipeline:
    """Two ControlNets: pictures, scales and spans are lists."""
    pipe = sdxl()
    nets = [
        drawn(
            diffusers.ControlNetModel.from_unet(
                pipe.unet, conditioning_embedding_out_channels=(4, 8)
            )
        )
        for _ in range(2)
    ]
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    return diffusers.StableDiffusionXLControlNetPipeline(**parts, controlnet=nets)


_IMAGE: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "pt"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "pag_sdxl": _IMAGE, "pag_sd3": {**_IMAGE, "max_sequence_length": 24},
    "control_sd3": {**_IMAGE, "max_sequence_length": 24}, "ddim": _IMAGE, "guided": _IMAGE,
    "forcing": {
        "height": 16, "width": 16, "num_frames": 9, "num_inference_steps": 2,
        "max_sequence_length": 16, "output_type": "pt",
    },
}  # fmt: skip


def state_of(pipe: diffusers.DiffusionPipeline) -> dict[str, Any]:
    """Everything that a pipeline and its components hold, by path: values, or ids of objects."""
    found: dict[str, Any] = {}
    for name, value in vars(pipe).items():
        if isinstance(value, nn.Module):
            for inner, module in value.named_modules():
                _note(found, f"{name}.{inner}", module)
        else:
            found[name] = _value(value)
            if hasattr(value, "__dict__") and not isinstance(value, type):
                _note(found, name, value)
    return found


def _note(found: dict[str, Any], path: str, holder: Any) -> None:
    found[f"{path}.__class__"] = type(holder)
    for name, value in vars(holder).items():
        is_hooks = name.endswith("_hooks") and isinstance(value, dict)  # by a running number
        found[f"{path}.{name}"] = _value([*value.values()] if is_hooks else value)
        if isinstance(value, nn.Parameter):
            found[f"{path}.{name}.requires_grad"] = value.requires_grad
        if name == "_parameters":
            for key, weight in value.items():
                if weight is not None:
                    total = float(weight.detach().double().sum())
                    flags = weight.requires_grad, weight.dtype, total
                    found[f"{path}.{key}.weight"] = flags


def _value(value: Any) -> Any:
    """What can be compared between two pipelines that were built alike."""
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)):
        return value
    if isinstance(value, (dict, OrderedDict)):
        return type(value), [(str(key), _value(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_value(one) for one in value]
    if isinstance(value, set):
        return sorted(map(str, value))
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, float(value.detach().double().sum())
    return type(value)


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    names = sorted(left.keys() | right.keys())
    return [name for name in names if left.get(name) != right.get(name)]
