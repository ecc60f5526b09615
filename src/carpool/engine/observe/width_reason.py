"""Why a forward is not wider, in words: the policy's reason, or what the fuse keys differ in."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from carpool.schedule.views import Choice, ParkedCall

LOOKED_AT = 8  # other calls, to find the most similar

WORDS: Mapping[str, str] = {  # the most telling first
    "size": "hidden_states sample x z pixel_values img_ids image_grid_thw target_size "
    "video_coords audio_hidden_states indices_hidden_states",
    "text length": "encoder_hidden_states text_encoder_hidden_states audio_encoder_hidden_states "
    "input_ids attention_mask encoder_attention_mask audio_encoder_attention_mask "
    "encoder_hidden_states_mask text_bth cap_feats txt_ids position_ids",
    "guidance": "guidance timestep_cond",
    "control": "controlnet_cond controlnet_mode controlnet_block_samples "
    "controlnet_single_block_samples down_block_additional_residuals "
    "mid_block_additional_residual conditioning_scale",
    "adapters": "",
}
_WORD = {argument: word for word, arguments in WORDS.items() for argument in arguments.split()}
_ORDER = {word: place for place, word in enumerate(["dtype", *WORDS])}
_ABSENT = object()


def width_reason(choice: Choice, parked: Sequence[ParkedCall]) -> str:
    """Why a forward is not wider: the policy's reason, unless that was that no other call fits.

    Then `nobody`: no other call is parked. `group`: others fit, but would slow down the requests
    that began together. `differs:WHAT`: what the most similar call of the method differs in, such
    as `size`, or `component` where all others are parked on other methods.
    """
    if choice.why != "nobody" and not choice.why.startswith("differs:"):
        return choice.why
    if len(parked) == len(choice.calls):
        return "nobody"
    leader, chosen = choice.calls[0], {call.order for call in choice.calls}
    method = leader.kind.name
    others = (c.key for c in parked if c.order not in chosen and c.kind.name == method)
    keys = list(islice(others, LOOKED_AT))
    if not keys:
        return "differs:component"
    return "group" if leader.key in keys else f"differs:{nearest(leader.key, keys)}"


def nearest(key: Hashable, others: Iterable[Hashable]) -> str:
    """In what a key differs from the most similar of the others; the most telling word."""
    words = min((differences(key, other) for other in others), key=len)
    return min(words, key=lambda word: (_ORDER.get(word, len(_ORDER)), word), default="arguments")


def differences(one: Hashable, other: Hashable) -> set[str]:
    """In what two fuse keys of one method, made by `Fuser.describe`, differ: words, or arguments.

    `alone` is a call that fuses with none.
    """
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return {"alone"}
    if len(one) == 2:  # adapters apart: see `lora_batching`
        differing = {"adapters"} if one[1] != other[1] else set[str]()
        return differing | differences(one[0], other[0]) if one[0] != other[0] else differing
    left, right = dict[str, Any](one[2]), dict[str, Any](other[2])
    names = {**left, **right}
    return {
        _word(name, left.get(name), right.get(name))
        for name in names
        if left.get(name, _ABSENT) != right.get(name, _ABSENT)
    }


def _word(name: str, left: Any, right: Any) -> str:
    types = [_dtype(left), _dtype(right)]
    if None not in types and types[0] != types[1]:
        return "dtype"
    word = _WORD.get(name, name)
    is_said_once = left is None or right is None
    return name if is_said_once and word in ("size", "text length") else word


def _dtype(part: Any) -> torch.dtype | None:
    is_tensor = isinstance(part, tuple) and part and isinstance(part[0], torch.dtype)
    return part[0] if is_tensor else None
