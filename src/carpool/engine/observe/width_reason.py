"""The reason why a forward is not wider: the difference of the fuse keys."""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

from carpool.schedule.views import Choice, ParkedCall

LOOKED_AT = 8  # other calls to compare, for the most similar one

WORDS: Mapping[str, str] = {  # most telling first
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
    """The reason why the policy found no other call that fits, while others are parked.

    `group`: others fit, but would slow down the cohort that started together. `differs:WHAT`: the
    main difference from the most similar call of the method, such as `size`, or `component`.
    """
    leader, members = choice.calls[0], {call.order for call in choice.calls}
    method = leader.kind.name
    keys_of_method = (c.key for c in parked if c.order not in members and c.kind.name == method)
    keys = tuple(islice(keys_of_method, LOOKED_AT))
    if not keys:
        return "differs:component"
    return "group" if leader.key in keys else f"differs:{nearest(leader.key, keys)}"


@lru_cache(256)
def nearest(key: Hashable, candidates: tuple[Hashable, ...]) -> str:
    """The main difference of a key from the most similar candidate, as a word."""
    words = min((differences(key, candidate) for candidate in candidates), key=len)
    return min(words, key=lambda word: (_ORDER.get(word, len(_ORDER)), word), default="arguments")


def differences(first: Hashable, second: Hashable) -> set[str]:
    """The differences of two fuse keys of one method, by `Fuser.describe`: words, or arguments.

    `alone`: a call that runs alone.
    """
    if not isinstance(first, tuple) or not isinstance(second, tuple):
        return {"alone"}
    if len(first) == 2:  # includes the adapters: see `lora_batching`
        differing = {"adapters"} if first[1] != second[1] else set[str]()
        return differing | differences(first[0], second[0]) if first[0] != second[0] else differing
    first_part, second_part = dict[str, Any](first[2]), dict[str, Any](second[2])
    names = {**first_part, **second_part}
    return {
        _word(name, first_part.get(name), second_part.get(name))
        for name in names
        if first_part.get(name, _ABSENT) != second_part.get(name, _ABSENT)
    }


def _word(name: str, first: Any, second: Any) -> str:
    types = [_dtype(first), _dtype(second)]
    if None not in types and types[0] != types[1]:
        return "dtype"
    word = _WORD.get(name, name)
    is_said_once = first is None or second is None
    return name if is_said_once and word in ("size", "text length") else word


def _dtype(part: Any) -> torch.dtype | None:
    is_tensor = isinstance(part, tuple) and part and isinstance(part[0], torch.dtype)
    return part[0] if is_tensor else None
