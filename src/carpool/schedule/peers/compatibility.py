"""Compatibility rules of whole-request batches: caps, costs, signatures, keys.

Two batching modes form batches of whole requests. `dynamic` is SGLang-Diffusion's: a request
that equals the head of the queue except for prompt and seed may join it, up to the caps of
`sglang_rules.py`. `request` is vLLM-Omni's: a request with the head's key may join. `batches.py`
forms the batches.

No queue, no clock. Both modes serve users of those engines; `continuous` fuses requests that
differ in much of this.

Source: SGLang-Diffusion 0.5.23 and vLLM-Omni 0.30, as their schedulers behave.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from carpool.request.images import NAMES as PICTURES
from carpool.settings.peers.sglang_rules import Resolution
from carpool.types import CheckedRequest

Signature = Mapping[str, Hashable]
"""The parameters of a request, by name, that must be equal within a batch."""

PROMPTS = {"prompt", "prompt_2", "prompt_3", "prompt_4"} | {  # or their encoded embeddings
    "prompt_embeds", "pooled_prompt_embeds", "prompt_embeds_mask", "prompt_attention_mask"
}  # fmt: skip
NEGATIVES = {f"negative_{name}" for name in PROMPTS}
NEGATIVE_TEXTS = {"negative_prompt", *(f"negative_prompt_{n}" for n in (2, 3, 4))}
FIELDS = (  # also SGLang-Diffusion's fields, in its order of comparison
    "task_type",
    "negative_prompt",
    "num_outputs_per_prompt",
    "num_frames",
    "height",
    "width",
    "fps",
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "true_cfg_scale",
    "guidance_rescale",
    "cfg_normalization",
    "boundary_ratio",
    "max_sequence_length",
    "flow_shift",
    "lora",
)
RENAMED = {"frame_rate": "fps"}  # diffusers' name: SGLang-Diffusion's name


@dataclass(frozen=True, slots=True)
class _Object:
    """A value without comparison by content: equal only to itself."""

    value: object

    def __eq__(self, operand: object) -> bool:
        return isinstance(operand, _Object) and operand.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _frozen(value: Any) -> Hashable:
    match value:
        case str() | int() | float() | None:
            return value
        case list() | tuple():
            return tuple(map(_frozen, value))
        case dict():
            return frozenset((key, _frozen(element)) for key, element in value.items())
    return _Object(value)


def resolution(arguments: Mapping[str, Any], default_px: Resolution | None) -> Resolution | None:
    """The size of a request's output, from its arguments and the model's default."""
    default = default_px or (None, None)
    width, height = (
        side if arguments.get(name) is None else arguments[name]
        for name, side in zip(("width", "height"), default, strict=True)
    )
    return None if width is None or height is None else (width, height)


def cost(
    resolution: Resolution | None, *, frames: int = 1, outputs: int = 1, vae_scale_px: int
) -> float:
    """The cost of a request towards `max_cost`: latent positions x frames x outputs.

    Not seconds and not bytes. The frames are the video's own, not latent ones.

    Args:
        resolution: None: unknown, cost 0.
        vae_scale_px: pixels per latent position along a side.

    Source: SGLang-Diffusion's `estimate_request_cost`, as in most of its pipelines.
    """
    width, height = resolution or (0, 0)
    places = math.ceil(width / vae_scale_px) * math.ceil(height / vae_scale_px)
    return float(places * frames * outputs)


def signature(request: CheckedRequest, defaults: Mapping[str, Any]) -> Signature:
    """All parameters that two requests of a dynamic batch must share: all but prompt and seed.

    They include the negative prompt, the number of outputs, the task and the adapters. A missing
    parameter equals one with the default's value. Tensors and objects equal only themselves.

    Args:
        defaults: the pipeline's defaults for missing arguments, if known.
    """
    arguments = _given(request, defaults)
    return {
        **{name: _frozen(value) for name, value in arguments.items() if name not in PROMPTS},
        "task_type": request.task,
        "lora": request.lora,
        "num_outputs_per_prompt": request.group_size,
    }


def signature_difference(first: Signature, right: Signature) -> str | None:
    """The first reason why two requests cannot share a dynamic batch, or None.

    A request with input images shares with none, not even with itself: so a head is checked
    against itself.

    Returns:
        `image_conditioning`, `sampling_params.FIELD` for a parameter that SGLang-Diffusion has
        too, or `extra.diffusers_kwargs` for others; the first in its order.
    """
    if not (first.keys().isdisjoint(PICTURES) and right.keys().isdisjoint(PICTURES)):
        return "image_conditioning"
    differing = {name for name in first.keys() | right.keys() if first.get(name) != right.get(name)}
    if not differing:
        return None
    fields = {RENAMED.get(name, name) for name in differing}
    for field in FIELDS:
        if field in fields:
            return f"sampling_params.{field}"
    return "extra.diffusers_kwargs"


def request_key(request: CheckedRequest, defaults: Mapping[str, Any]) -> Hashable:
    """All parameters that two requests of a wave of mode `request` must share.

    All arguments, the task, the number of outputs and the adapters with their scales; of prompts,
    images and latents only their presence; of negative prompts only whether one is used: it is
    not empty, and `guidance_scale` is above 1. docs/scheduling.md lists the differences from
    vLLM-Omni's key.

    Args:
        defaults: as in `signature`.
    """
    free = {*PROMPTS, *NEGATIVES, *PICTURES, "latents"}
    arguments = _given(request, defaults)
    scale = arguments.get("guidance_scale")
    is_guided = (
        isinstance(scale, (int, float)) and scale > 1 and bool(arguments.get("negative_prompt"))
    )
    return (
        request.task,
        request.group_size,
        request.lora,
        is_guided,
        frozenset(
            (name, None if name in free else _frozen(arguments[name]))
            for name in arguments
            if name not in NEGATIVE_TEXTS
        ),
    )


def _given(request: CheckedRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    explicit = {name: value for name, value in request.arguments.items() if value is not None}
    return {name: value for name, value in {**defaults, **explicit}.items() if value is not None}
