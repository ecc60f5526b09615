"""Denoisers of video models."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.engine.specs.own import Own
from carpool.engine.specs.padding import Pad
from carpool.engine.specs.rules import (
    CONCAT,
    LIST,
    SHARE,
    STACK,
    STACKS,
    UNUSED,
    ArgumentRule,
    Keyed,
    Spec,
    State,
)


class _Caches:
    """Wan-Animate-2's caches of several calls, each with equally many rows, or one layer of them.

    Keys and values are joined when a layer reads them: at full size, 0.7 GB a layer and row.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = caches

    def get(self, *layer: int) -> Any:
        parts = [cache.get(*layer) for cache in self.caches]
        return _Caches(parts) if layer else [torch.cat(c) for c in zip(*parts, strict=True)]

    def store(self, *tensors: Tensor) -> None:
        columns = [tensor.chunk(len(self.caches)) for tensor in tensors]
        for cache, *own in zip(self.caches, *columns, strict=True):
            cache.store(*[tensor.clone() for tensor in own])  # a view would keep all rows alive


def _reference(cache: Any) -> Hashable:
    keys = cache.get(0).key  # (rows, reference tokens, heads, D)
    return "empty" if keys is None else (keys.dtype, keys.shape[1:])


_GRID = Keyed(STACK, lambda grid: tuple(grid.flatten().tolist()))
_WAN = Spec.of(
    hidden_states=STACK,  # (rows, 16, 36 or 48, frames, H / 8, W / 8)
    timestep=STACK,  # (rows,), 0-1000; Wan 2.2 5B: (rows, video tokens)
    encoder_hidden_states=STACK,  # (rows, text tokens, 4096): no mask, never padded
    encoder_hidden_states_image=CONCAT,  # (rows, or 2 rows with a last image, 257, D)
)

_COSMOS = {
    "timestep": STACK,  # (rows,) or (rows, 1, frames, 1, 1)
    "encoder_hidden_states": CONCAT,  # (rows, 512, 1024), or two such: text and image
    "condition_mask": STACK,  # (rows, 1, frames, H / 8, W / 8)
    "padding_mask": SHARE,  # (1, 1, H, W), repeated for all rows
    "attention_mask": STACK,  # (rows, text tokens)
}
_HUNYUAN: dict[str, ArgumentRule] = {
    "timestep": STACK,  # (rows,), 0-1000
    "encoder_hidden_states": Pad(mask="encoder_attention_mask"),  # (rows, tokens, 4096)
    "encoder_attention_mask": Pad(mask="encoder_attention_mask"),  # only its sum is read
    "pooled_projections": STACK,  # (rows, 768)
    "guidance": STACK,  # (rows,), or None for models without guidance embedding
}

SPECS: dict[tuple[str, str], Spec] = {
    ("AnyFlowFARTransformer3DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, frames, 16, H / 8, W / 8), one chunk
        timestep=STACK,  # (rows, frames), 0-1000
        r_timestep=STACK,  # (rows, frames), 0-1000
        encoder_hidden_states=STACK,  # (rows, text tokens, 4096)
        encoder_hidden_states_image=STACK,  # (rows, 257, 1280)
        kv_cache=Own(),  # per layer (2, rows, heads, tokens, D): flags fix the count
        # attention_mask, an object, in calls that fill the cache after a chunk: they run alone
    ),
    ("CogVideoXTransformer3DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, frames, 16 or 32, H / 8, W / 8)
        encoder_hidden_states=STACK,  # (rows, 226, 4096): always padded
        timestep=STACK,  # (rows,), 0-1000
        timestep_cond=STACK,
        ofs=SHARE,  # (1,), for any number of rows
        image_rotary_emb=SHARE,  # two of (video tokens, 64)
    ),
    ("CosmosControlNetModel", "forward"): Spec(
        rows="latents", rules={**_COSMOS, "latents": STACK, "controls_latents": STACK}
    ),
    ("CosmosTransformer3DModel", "forward"): Spec.of(
        "hidden_states",
        **_COSMOS,
        hidden_states=STACK,  # (rows, 16, frames, H / 8, W / 8)
        block_controlnet_hidden_states=STACKS,
    ),
    ("HeliosTransformer3DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 16, frames, h, w): h, w of the pyramid's stage
        timestep=STACK,  # (rows,), 0-1000
        encoder_hidden_states=STACK,  # (rows, text tokens, 4096): no mask, never padded
        indices_hidden_states=SHARE,  # (1, frames), for any number of rows
        indices_latents_history_short=SHARE,  # (1, 2)
        indices_latents_history_mid=SHARE,  # (1, 2)
        indices_latents_history_long=SHARE,  # (1, 16)
        latents_history_short=STACK,  # (rows, 16, 2, H / 8, W / 8)
        latents_history_mid=STACK,  # (rows, 16, 2, H / 8, W / 8)
        latents_history_long=STACK,  # (rows, 16, 16, H / 8, W / 8)
    ),
    ("HunyuanVideo15Transformer3DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 65, frames, H / 16, W / 16)
        timestep=STACK,  # (rows,), 0-1000
        timestep_r=STACK,
        encoder_hidden_states=STACK,  # (rows, 1000, 3584): always padded
        encoder_attention_mask=STACK,  # (rows, 1000): each row is sorted by itself
        encoder_hidden_states_2=STACK,  # (rows, 256, 1472)
        encoder_attention_mask_2=STACK,
        # (rows, 729, 1152): zeros are masked only if those of all rows are zero
        image_embeds=Keyed(STACK, lambda pictures: not bool(pictures.any())),
    ),
    ("HunyuanVideoFramepackTransformer3DModel", "forward"): Spec.of(
        "hidden_states",
        **_HUNYUAN,
        hidden_states=STACK,  # (rows, 16, frames, H / 8, W / 8)
        image_embeds=STACK,  # (rows, 729, 1152)
        indices_latents=SHARE,  # (frames,), like the others
        latents_clean=STACK,
        indices_latents_clean=SHARE,
        latents_history_2x=STACK,
        indices_latents_history_2x=SHARE,
        latents_history_4x=STACK,
        indices_latents_history_4x=SHARE,
    ),
    ("HunyuanVideoTransformer3DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 16 or 33, frames, H / 8, W / 8)
        **_HUNYUAN,
    ),
    # tiles of (frames, H / 8, W / 8, 33)
    ("Kandinsky6SRTransformer3DModel", "forward"): Spec.of(hidden_states=STACK, timestep=STACK),
    ("LTX2VideoTransformer3DModel", "forward"): Spec(  # returns video and audio
        rules={
            "hidden_states": STACK,  # (rows, video tokens, 128)
            "audio_hidden_states": STACK,  # (rows, audio tokens, 128)
            "encoder_hidden_states": STACK,  # (rows, text tokens, 3840)
            "audio_encoder_hidden_states": STACK,  # (rows, text tokens, 3840)
            "timestep": STACK,  # (rows,), 0-1000; image-to-video: (rows, video tokens)
            "audio_timestep": STACK,  # (rows,), or None: as `timestep`
            "sigma": STACK,  # (rows,), 0-1000
            "audio_sigma": STACK,  # (rows,), or None: as `sigma`
            "encoder_attention_mask": STACK,  # (rows, text tokens)
            "audio_encoder_attention_mask": STACK,  # (rows, text tokens)
            "video_coords": STACK,  # (rows, 3, video tokens, 2): sizes may differ
            "audio_coords": STACK,  # (rows, 1, audio tokens, 2)
            "num_frames": UNUSED,  # if there are coordinates
            "height": UNUSED,
            "width": UNUSED,
            "fps": UNUSED,
            "audio_num_frames": UNUSED,
        },
        needs=("video_coords", "audio_coords"),
    ),
    ("MochiTransformer3DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 12, frames, H / 8, W / 8)
        encoder_hidden_states=STACK,  # (rows, 256, 4096): always padded
        timestep=STACK,  # (rows,), 0-1000
        encoder_attention_mask=STACK,  # (rows, 256): rows attend one by one
    ),
    ("LTX2TextConnectors", "forward"): Spec.of(  # its registers depend on the padding
        text_encoder_hidden_states=STACK,  # (rows, text tokens, 3840 * 49)
        attention_mask=STACK,  # (rows, text tokens)
    ),
    ("WanTransformer3DModel", "forward"): _WAN,
    ("WanVACETransformer3DModel", "forward"): Spec(
        rules={**_WAN.rules, "control_hidden_states": STACK, "control_hidden_states_scale": SHARE}
    ),
    ("WanAnimate2Transformer3DModel", "forward"): Spec(
        returns_list=True,
        rules={
            # each (16, frames, H / 8, W / 8); the masks of all rows come from one grid
            "hidden_states": Keyed(LIST, lambda rows: tuple([row.shape for row in rows])),
            "timestep": STACK,  # (rows,), 0-1000
            "encoder_hidden_states": LIST,  # each (text tokens, 4096): padded by the model
            "condition_latents": LIST,  # each (20, frames, H / 8, W / 8)
            "encoder_hidden_states_image": STACK,  # (rows, 257, 1280)
            "kv_cache": State(_reference, joined=_Caches),
            **dict.fromkeys(("offset_grid_sizes", "reference_grid_sizes"), _GRID),  # (rows, 3)
        },
    ),
    ("Hunyuan3DDiT", "forward"): Spec.of(
        x=STACK,  # (rows, 3072 or 512 tokens, 64)
        t=STACK,  # (rows,), 0-1
        contexts={"main": STACK},  # (rows, image tokens, 1536)
        guidance=STACK,  # (rows,), distilled models
    ),
    ("SparseLinearWanTransformer", "forward"): _WAN,
    ("VideoSparseWanTransformer", "forward"): _WAN,
}
