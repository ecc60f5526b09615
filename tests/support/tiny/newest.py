"""The newest models, built from data: `newest.json` names the class and config of each part.

A part is a builder's name, or a class (`module:Class` where neither library exports it) and its
config; a key with a dot is a gain of that output.
"""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from support.tiny import parts
from support.tiny.parts import drawn, qwen2_tokenizer
from support.tiny.qwen import causal_vae, qwen_processor, qwen_vl  # noqa: F401 (by name)
from support.tiny.sana import deep_vae, gemma  # noqa: F401 (by name)
from support.tiny.wan import umt5, wan_vae  # noqa: F401 (by name)
from support.tiny.zimage import qwen3  # noqa: F401 (by name)

DATA: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
_QWEN_TOKENS = ("image_pad", "video_pad", "vision_start", "vision_end")


def qwen3_vl(name: str, layers: int, width: int = 16, **more: Any) -> Any:
    tokenizer = qwen2_tokenizer()
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 16}
    heads: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    rope["partial_rotary_factor"] = more.pop("partial_rotary_factor", 1.0)
    heads |= {"head_dim": 8, "rope_parameters": rope, **more}
    text = {**sizes, **heads, "vocab_size": len(tokenizer)}
    vision: dict[str, Any] = {**sizes, "depth": 2, "num_heads": 2, "out_hidden_size": width}
    places = [tokenizer.convert_tokens_to_ids(f"<|{token}|>") for token in _QWEN_TOKENS]
    tokens = {
        f"{n.removesuffix('_pad')}_token_id": i for n, i in zip(_QWEN_TOKENS, places, strict=True)
    }
    vision["deepstack_visual_indexes"], cls = [0], getattr(transformers, name)
    return drawn(cls(cls.config_class(text_config=text, vision_config=vision, **tokens)))


def qwen3_processor() -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    pixels = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56, patch_size=16)
    tokenizer, video = qwen2_tokenizer(), Qwen3VLVideoProcessor()
    return Qwen3VLProcessor(pixels, tokenizer, video, chat_template=tokenizer.chat_template)


def clip_processor() -> Any:
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    return transformers.CLIPProcessor(pixels, parts.clip_tokenizer())


def part(recipe: Any) -> Any:
    if recipe is None or isinstance(recipe, bool):
        return recipe
    name, config = (recipe, {}) if isinstance(recipe, str) else recipe
    builder: Callable[..., Any] | None = globals().get(name) or getattr(parts, name, None)
    if builder is not None:
        return builder(**config)
    place, _, short = name.rpartition(":")
    exported: Any = getattr(diffusers, name, None) or getattr(transformers, name, None)
    cls = getattr(import_module(place), short) if place else exported
    built = cls(cls.config_class(**config)) if hasattr(cls, "config_class") else cls(**config)
    return drawn(built) if isinstance(built, nn.Module) else built


def components(family: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    built: dict[str, Any] = {}
    for name, recipe in DATA[family].items():
        if name in without:
            continue
        owner, _, path = name.partition(".")
        if not path:
            built[name] = part(recipe)
            continue
        with torch.no_grad():
            for parameter in built[owner].get_submodule(path).parameters():
                parameter.mul_(recipe)
    return built


PARTS: dict[str, Callable[[], dict[str, Any]]] = {name: partial(components, name) for name in DATA}
_READERS = {"qwen_processor", "qwen3_processor", "siglip_processor"}
NEEDS_TORCHVISION = {
    name for name, recipe in DATA.items() if _READERS & {*recipe, *map(str, recipe.values())}
}
