"""Modular pipelines of tiny parts: diffusers' own blocks over the components of other pipelines."""

import sys
from collections.abc import Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import diffusers
import torch

from support.engine_driver import called, for_inference
from support.isolation import build
from support.matrix.qwen import shrunk
from support.newcomers import PICTURE
from support.tiny import ARGUMENTS, newest, tiny_pipeline
from support.tiny.parts import drawn


def vace() -> dict[str, Any]:
    """Wan 2.2 with a control; its blocks read the config of the first of two such transformers."""
    made: dict[str, Any] = tiny_pipeline("wan22_t2v_a14b").components
    names = signature(diffusers.WanVACETransformer3DModel.__init__).parameters.keys()
    for name in ("transformer", "transformer_2"):
        config = {n: v for n, v in made[name].config.items() if n in names}
        config |= {"vace_layers": [0, 1], "vace_in_channels": 96}
        made[name] = drawn(diffusers.WanVACETransformer3DModel(**config), last="proj_out", gain=0.3)
    return made


def ltx25() -> dict[str, Any]:
    return {**tiny_pipeline("ltx2").components, **newest.components("ltx25")}


PARTS = {**newest.PARTS, "vace": vace, "ltx25": ltx25}
_SMALL = {"height": 32, "width": 32, "max_sequence_length": 16}
_FLUX3 = {"height": 64, "width": 64, "text_encoder_out_layers": (1, 2), "max_new_tokens": 3}
_COSMOS3 = {
    **{"height": 16, "width": 16, "num_frames": 1, "guidance_scale": 2.0, "negative_prompt": "no"},
    **dict.fromkeys(
        ("use_system_prompt", "add_resolution_template", "add_duration_template"), False
    ),
}
_DISTILLED = {**_COSMOS3, "num_inference_steps": 3, "guidance_scale": 1.0}
_FALLING: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 4}
_FALLING["guidance_schedule"] = (7.0, 5.0, 3.0, 3.0)
_ANIMATED = {
    **{"height": 32, "width": 32, "segment_frame_length": 5, "max_sequence_length": 16},
    **{"image": PICTURE, "driving_video": [PICTURE] * 5},
}
_PYRAMID = {"pyramid_num_inference_steps_list": [2, 2, 2]}
CLASSES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # the family whose components it takes, and what a call needs beside them
    "FluxModularPipeline": ("flux", {}),
    "Flux2KleinBaseModularPipeline": ("flux2_klein_base", {}),
    "AnimaModularPipeline": ("anima", _SMALL),
    "Cosmos3OmniModularPipeline": ("cosmos3", _COSMOS3),
    "Flux3DistilledModularPipeline": ("flux3_distilled", _FLUX3),
    "Flux3ModularPipeline": ("flux3", _FLUX3),
    "MiniMaxH3ModularPipeline": ("minimax_h3", {"height": 32, "width": 32, "num_frames": 124}),
    "ErnieImageModularPipeline": ("ernie", {}),
    "Flux2KleinModularPipeline": ("flux2_klein", {}),
    "Flux2ModularPipeline": ("flux2", {}),
    "FluxKontextModularPipeline": ("kontext", {"image": PICTURE}),
    "HeliosModularPipeline": ("helios_base", {}),
    "HeliosPyramidDistilledModularPipeline": ("helios_distilled", _PYRAMID),
    "HeliosPyramidModularPipeline": ("helios_mid", _PYRAMID),
    "Krea2ModularPipeline": ("krea2", _SMALL),
    "Krea2TurboModularPipeline": ("krea2", _SMALL),
    "LTX2ModularPipeline": ("ltx2", {}),
    "LTXModularPipeline": ("ltx", {}),
    "QwenImageModularPipeline": ("qwen_image", {}),
    "QwenImage21ModularPipeline": ("qwen_21", {}),
    "QwenImage21TurboModularPipeline": ("qwen_21", {}),
    "QwenImageEditModularPipeline": ("qwen_edit", {"image": PICTURE}),
    "QwenImageEditPlusModularPipeline": ("qwen_edit_plus", {"image": PICTURE}),
    "QwenImageLayeredModularPipeline": ("qwen_layered", {"image": PICTURE.convert("RGBA")}),
    "EchoModularPipeline": ("ltx2", {}),
    "LTX25ModularPipeline": ("ltx25", {**ARGUMENTS["ltx2"], "num_frames": 9}),
    "Ideogram4ModularPipeline": ("Ideogram4Pipeline", _FALLING),
    "HunyuanVideo15ModularPipeline": ("hunyuan15", {"height": 16, "width": 16, "num_frames": 9}),
    "MiniMaxMusic3ModularPipeline": ("minimax_music3", {"lyrics": "la", "audio_duration": 0.2}),
    "WanAnimate2ModularPipeline": ("wan_animate_2", _ANIMATED),
    "WanAnimate2DistilledModularPipeline": ("wan_animate_2", _ANIMATED),
    "Cosmos3DistilledModularPipeline": ("cosmos3_distilled", _DISTILLED),
    "StableDiffusion3ModularPipeline": ("sd3", {}),
    "StableDiffusionXLModularPipeline": ("sdxl", {"height": 64, "width": 64}),
    "Wan22Image2VideoModularPipeline": ("wan22_i2v_a14b", {"image": PICTURE}),
    "Wan22ModularPipeline": ("wan22_t2v_a14b", {}),
    "Wan22VaceModularPipeline": ("vace", {**_SMALL, "height": 16, "width": 16, "num_frames": 5}),
    "WanImage2VideoModularPipeline": ("wan21_i2v", {"image": PICTURE}),
    "WanModularPipeline": ("wan21_t2v", {}),
    "ZImageModularPipeline": ("zimage", {}),
}


def modular(name: str, **others: Any) -> diffusers.ModularPipeline:
    """A modular pipeline over a family's components, some of them replaced; the same every time."""

    def make() -> diffusers.ModularPipeline:
        pipe = getattr(diffusers, name)()
        family = CLASSES[name][0]
        have = PARTS[family]() if family in PARTS else tiny_pipeline(family).components
        taken = {n: one for n, one in have.items() if n in pipe.pretrained_component_names}
        pipe.update_components(**{**taken, **others})
        if "QwenImage" in name:
            shrunk(pipe, "diffusers.modular_pipelines.qwenimage.encoders")
        if "distilled_sigmas" in pipe.config:
            pipe.register_to_config(distilled_sigmas=[1.0, 0.7, 0.4])
        if hasattr(pipe, "disable_safety_checker"):  # of Cosmos 3, whose package is not here
            pipe.disable_safety_checker()
        return pipe

    fake_ftfy()
    return build(make)


def arguments(pipe: diffusers.ModularPipeline) -> dict[str, Any]:
    """How to call it at the smallest size."""
    family, own = CLASSES[type(pipe).__name__]
    taken = set(pipe.blocks.input_names)
    return {
        n: v
        for n, v in {**ARGUMENTS.get(family, {}), **own, "output_type": "pt"}.items()
        if n in taken
    }


def asked(
    pipe: diffusers.ModularPipeline, requests: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Requests with what a call needs; a class of a fixed number of steps keeps it."""
    own, taken = CLASSES[type(pipe).__name__][1], {"prompt", *pipe.blocks.input_names}
    fixed = {n: own[n] for n in own if n == "num_inference_steps"}
    merged = [{**arguments(pipe), **request, **fixed} for request in requests]
    return [{n: v for n, v in request.items() if n in taken} for request in merged]


def plain(pipe: diffusers.ModularPipeline, *, seed: int, **given: Any) -> torch.Tensor:
    """What diffusers gives for a request: pictures or videos, as tensors."""
    names = set(pipe.blocks.output_names)
    name = next(one for one in ("images", "videos", "audios") if one in names)
    made = called(for_inference(pipe), seed, **given, output=name)
    return torch.as_tensor(made[0] if isinstance(made, list) else made)  # a list: its layers


def fake_ftfy() -> None:
    """Let blocks clean prompts without ftfy, which some of them take for granted."""
    for family in ("wan", "helios"):
        name = f"diffusers.modular_pipelines.{family}.encoders"
        __import__(name)
        if not hasattr(sys.modules[name], "ftfy"):
            vars(sys.modules[name])["ftfy"] = SimpleNamespace(fix_text=lambda text: text)
