"""A pipeline's card: the facts about a loaded model that clients may see."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffusers import ModularPipeline

from carpool.config import EngineSettings
from carpool.engine.model.dmd import DMDScheduler
from carpool.engine.model.modular import Pipeline
from carpool.engine.model.prompt_weights import weights_reader
from carpool.engine.model.samplers import offered
from carpool.engine.model.signature import source_of
from carpool.errors import Rejected, SettingRejected
from carpool.request.card import Card, Task
from carpool.request.enhancement import ALWAYS, PLANS, REWRITER, enhancer_of
from carpool.request.parameters import check
from carpool.settings.peers.sampling_defaults import sampling_defaults, split
from carpool.types import Request

_OPEN_CLIP_WIDTH = 1024  # width of Stable Diffusion 2's text encoder; Stable Diffusion 1 has 768

log = logging.getLogger("carpool")


def card_of(
    pipe: Pipeline,
    name: str,
    extra: Mapping[str, Any],
    settings: EngineSettings,
    tasks: tuple[Task, ...],
) -> Card:
    """The card of a pipeline, for clients; `extra` is the content of its card file."""
    defaults = extra.get("defaults", {})
    cls: Any = type(pipe)
    if isinstance(getattr(pipe, "scheduler", None), DMDScheduler):
        steps = len(pipe.scheduler.config.levels)
        defaults = {"num_inference_steps": steps, "guidance_scale": 1.0, **defaults}
    takes = {parameter.name: parameter for task in tasks for parameter in task.parameters}
    requested, lines = split(sampling_defaults(settings.default_sampling_params), takes)
    for line in lines:
        log.warning("%s", line)
    defaults = {**defaults, **requested}
    is_elsewhere = settings.language_url is not None and not hasattr(pipe, PLANS)
    parts = {**pipe.components, **vars(pipe)}
    if isinstance(pipe, ModularPipeline):
        if parts.get("prompt_enhancer") is None:
            parts["processor"] = None  # LTX-2's blocks write with no other model
        kinds = [type(block).__name__ for block in pipe.blocks.sub_blocks.values()]
        parts |= {ALWAYS: parts.get("pe")} if "ErnieImagePromptEnhancerStep" in kinds else {}
    card = Card(
        id=name, tasks=tasks, defaults=dict(defaults),
        size_multiple_px=_size_multiple(pipe), default_size_px=_default_size(pipe, defaults),
        max_pixels=min(settings.max_pixels, extra.get("max_pixels", settings.max_pixels)),
        max_steps=settings.max_steps, frame_step=_frame_step(pipe),
        rounds_sizes="Dimensions will be resized accordingly" in source_of(cls, "check_inputs"),
        scheduler=type(pipe.scheduler).__name__ if getattr(pipe, "scheduler", None) else "",
        schedulers=offered(pipe), has_fixed_text_layer=_has_fixed_text_layer(pipe),
        enhancer=REWRITER if is_elsewhere else enhancer_of(parts, takes),
        enhances=settings.enhance_prompt, weights_reader=weights_reader(pipe, tasks),
    )  # fmt: skip
    if card.enhances and not card.enhancer:
        raise SettingRejected(
            f"enhance_prompt: {name} has no model that rewrites prompts: give --rewriter or "
            "--language-url",
            param="enhance_prompt",
        )
    _check_defaults(card, requested)
    return card


def _check_defaults(card: Card, requested: Mapping[str, Any]) -> None:
    """Refuse defaults that would be invalid in a request.

    Raises:
        SettingRejected: a default is invalid; the text names the parameter and its rule.
    """
    bare = replace(card, defaults={})
    for name, value in requested.items():
        try:
            check(bare, Request("a", **{name: value}), from_json=True)
        except Rejected as error:
            if error.param == name:
                raise SettingRejected(f"default_sampling_params: {error}", param=name) from error


def _size_multiple(pipe: Pipeline) -> int:
    factor = 1
    for name in ("video_processor", "image_processor"):  # Wan's image_processor is CLIP's
        config = getattr(getattr(pipe, name, None), "config", None)
        factor = getattr(config, "vae_scale_factor", factor)
    if hasattr(pipe, "patch_size"):
        patch = pipe.patch_size  # video models have a tuple: frames, height, width
        return int(factor * (patch if isinstance(patch, int) else patch[-1]))
    # image processors include the denoiser's patches
    return int(factor * (_patch_px(pipe) if hasattr(pipe, "video_processor") else 1))


def _has_fixed_text_layer(pipe: Pipeline) -> bool:
    """Whether its text encoders differ from Stable Diffusion 1's: OpenCLIP's, or several."""
    config = getattr(getattr(pipe, "text_encoder", None), "config", None)
    is_open_clip = getattr(config, "hidden_size", None) == _OPEN_CLIP_WIDTH
    return is_open_clip or getattr(pipe, "text_encoder_2", None) is not None


def _patch_px(pipe: Pipeline) -> int:
    """Latent positions per side of the denoiser's patches."""
    for name in ("transformer", "transformer_2"):
        patch = getattr(getattr(getattr(pipe, name, None), "config", None), "patch_size", None)
        if patch is not None:
            return int(patch[-1] if isinstance(patch, (tuple, list)) else patch)
    return 1


def _frame_step(pipe: Pipeline) -> int:
    """Frames of a video per latent."""
    names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    factors = (getattr(pipe, name, None) for name in names)
    return int(next((factor for factor in factors if factor), 1))


def _default_size(pipe: Pipeline, defaults: Mapping[str, Any]) -> tuple[int, int] | None:
    if "width" in defaults and "height" in defaults:
        return defaults["width"], defaults["height"]
    sample = getattr(pipe, "default_sample_size", None)
    factor = getattr(pipe, "vae_scale_factor", None)
    if not isinstance(sample, int) or not isinstance(factor, int):
        return None
    return sample * factor, sample * factor
