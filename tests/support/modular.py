"""Modular pipelines of tiny parts: diffusers' own blocks over the components of other pipelines."""

import sys
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import ModularPipeline
from PIL import Image
from torch import nn

from support.isolation import build
from support.tiny import ARGUMENTS, FAMILIES

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
OTHER = Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8))
MASK = Image.fromarray(np.kron(np.eye(2, dtype=np.uint8) * 255, np.ones((32, 32), np.uint8)))

CLASSES = {  # the family whose components it takes, and what a call needs beside them
    "FluxModularPipeline": ("flux", {}),
    "Flux2KleinBaseModularPipeline": ("flux2_klein_base", {}),
    "ErnieImageModularPipeline": ("ernie", {}),
    "Flux2KleinModularPipeline": ("flux2_klein", {}),
    "Flux2ModularPipeline": ("flux2", {}),
    "FluxKontextModularPipeline": ("kontext", {"image": PICTURE}),
    "HeliosModularPipeline": ("helios_base", {}),
    "LTX2ModularPipeline": ("ltx2", {}),
    "LTXModularPipeline": ("ltx", {}),
    "QwenImageModularPipeline": ("qwen_image", {}),
    "QwenImageEditModularPipeline": ("qwen_edit", {"image": PICTURE}),
    "QwenImageEditPlusModularPipeline": ("qwen_edit_plus", {"image": [PICTURE, OTHER]}),
    "StableDiffusion3ModularPipeline": ("sd3", {}),
    "StableDiffusionXLModularPipeline": ("sdxl", {"height": 64, "width": 64}),
    "Wan22Image2VideoModularPipeline": ("wan22_i2v_a14b", {"image": PICTURE}),
    "Wan22ModularPipeline": ("wan22_t2v_a14b", {}),
    "WanImage2VideoModularPipeline": ("wan21_i2v", {"image": PICTURE}),
    "WanModularPipeline": ("wan21_t2v", {}),
    "ZImageModularPipeline": ("zimage", {}),
}


def modular(name: str, **others: Any) -> ModularPipeline:
    """A modular pipeline over a family's components, some of them replaced; the same every time."""

    def make() -> ModularPipeline:
        pipe = getattr(diffusers, name)()
        have = {**FAMILIES[CLASSES[name][0]]().components, **others}
        taken = {n: one for n, one in have.items() if n in pipe.pretrained_component_names}
        pipe.update_components(**taken, **{n: others[n] for n in others if n not in taken})
        return pipe

    fake_ftfy()
    return build(make)


def arguments(pipe: ModularPipeline) -> dict[str, Any]:
    """How to call it at the smallest size."""
    family, own = CLASSES[type(pipe).__name__]
    taken = set(pipe.blocks.input_names)
    return {
        n: v for n, v in {**ARGUMENTS[family], **own, "output_type": "pt"}.items() if n in taken
    }


def plain(pipe: ModularPipeline, *, seed: int, **given: Any) -> torch.Tensor:
    """What diffusers gives for a request: pictures or videos, as tensors."""
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
    torch.manual_seed(seed)
    names = set(pipe.blocks.output_names)
    name = next(one for one in ("images", "videos") if one in names)
    made = pipe(**given, generator=torch.Generator().manual_seed(seed), output=name)
    return torch.as_tensor(made)


def fake_ftfy() -> None:
    """Let blocks clean prompts without ftfy, which some of them take for granted."""
    for family in ("wan", "helios"):
        name = f"diffusers.modular_pipelines.{family}.encoders"
        __import__(name)
        if not hasattr(sys.modules[name], "ftfy"):
            vars(sys.modules[name])["ftfy"] = SimpleNamespace(fix_text=lambda text: text)
