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
from diffusers.pipelines.deepfloyd_if import IFSafetyChecker
from torch import nn
from transformers import CLIPImageProcessor

from support.tiny import tiny_pipeline
from support.tiny.newest import components
from support.tiny.parts import drawn


class OneNet(diffusers.DiffusionPipeline):  # type: ignore[misc]
    """A pipeline of one module; what it does is a test's own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.register_modules(net=net)


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


def parts(pipe: diffusers.DiffusionPipeline, **others: Any) -> dict[str, Any]:
    """The components of a pipeline, some of them replaced."""
    return {name: one for name, one in {**pipe.components, **others}.items() if one is not None}


def pag_sdxl() -> diffusers.StableDiffusionXLPAGPipeline:
    """Perturbed attention: processors are exchanged during a call with `pag_scale` above 0."""
    return diffusers.StableDiffusionXLPAGPipeline(
        **tiny_pipeline("sdxl").components, pag_applied_layers="mid"
    )


def pag_sd3() -> diffusers.StableDiffusion3PAGPipeline:
    made = parts(tiny_pipeline("sd3"))
    return diffusers.StableDiffusion3PAGPipeline(**made, pag_applied_layers="blocks.1")


def control_sd3() -> diffusers.StableDiffusion3ControlNetPipeline:
    """Its VAE's posterior is sampled without the generator: from torch's global numbers."""
    pipe = tiny_pipeline("sd3")
    net = diffusers.SD3ControlNetModel.from_transformer(
        pipe.transformer, num_layers=1, num_extra_conditioning_channels=0
    )
    return diffusers.StableDiffusion3ControlNetPipeline(**parts(pipe), controlnet=drawn(net))


def ddim() -> diffusers.StableDiffusionPipeline:
    """A scheduler whose config the constructors of its sisters would correct."""
    made = tiny_pipeline("sd15").components
    pipe = diffusers.StableDiffusionPipeline(**made, requires_safety_checker=False)
    pipe.register_modules(scheduler=diffusers.DDIMScheduler(clip_sample=True, steps_offset=0))
    return pipe


def guided() -> diffusers.HunyuanImagePipeline:
    """A guider that keeps its step and its momentum."""
    guider = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1)
    return diffusers.HunyuanImagePipeline(**components("guided"), guider=guider)


def forcing() -> diffusers.SkyReelsV2DiffusionForcingPipeline:
    """`causal_block_size` is written into the transformer's config."""
    return diffusers.SkyReelsV2DiffusionForcingPipeline(**components("forcing"))


class Checker(IFSafetyChecker):  # type: ignore[misc]
    """Finds every picture unsafe, and says so by painting it black."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, clip_input: Any, images: Any, **_: Any) -> Any:
        return np.zeros_like(images), [True] * len(images), [False] * len(images)


def pixels() -> diffusers.IFPipeline:
    """DeepFloyd IF: rescales, checks and marks its pictures for "pil" and "np", not for "pt"."""
    pipe = diffusers.IFPipeline(**components("pixels"))
    reader = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    vars(pipe).update(safety_checker=Checker(), feature_extractor=reader)
    return pipe


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
