"""Denoisers of image models."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from carpool.engine.digests import Unfusable
from carpool.engine.per_call import PerCall
from carpool.engine.specs.own import Own, Prefix
from carpool.engine.specs.padding import Pad
from carpool.engine.specs.rule import JoinContext
from carpool.engine.specs.rules import (
    FACTOR,
    LAYERS,
    LIST,
    SCALAR,
    SHARE,
    STACK,
    STACKS,
    Keyed,
    Spec,
    State,
)

_OF_ONE_REQUEST = State(state_key=lambda _: None)


@contextmanager
def own_positions(
    module: Any, batch: Sequence[Mapping[str, Any]], rows: Sequence[int]
) -> Iterator[None]:
    """Qwen-Image-2.1 positions an image after its prompt: use each call's own positions."""
    shapes, is_cached = batch[0]["img_shapes"][0], batch[0].get("kv_cache_mode") == "cached"

    def places(rope: Any, args: Any, kwargs: Any, first: Tensor) -> Any:
        if not is_cached or args[0] is not shapes:  # a call in another forward
            return None
        target, own = math.prod(shapes[-1]), []
        more = sum(map(math.prod, shapes)) * 3 // 4  # one place becomes four
        for mask in [arguments["img_mask"][0] for arguments in batch]:
            repeats, size = torch.where(mask, 4, 1), len(mask) + more
            pads = torch.repeat_interleave(mask, repeats, output_size=size)
            whole = rope.forward(shapes, pads, **kwargs)
            own.append(torch.cat([first[:-target], whole[-target:]]))
        return PerCall(own, rows)

    handle = module.pos_embed.register_forward_hook(places, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class _GlmCaches(Own):
    """GLM-Image reads and writes its caches of input images only in calls with the prompt."""

    def form(self, value: Any) -> Hashable:
        modes = {layer.mode for layer in value.caches}
        if "write" in modes:
            raise Unfusable
        return Own.form(self, value) if "read" in modes else "not read"

    def join(self, values: Sequence[Any], context: JoinContext) -> Any:
        is_read = self.form(values[0]) != "not read"
        return Own.join(self, values, context) if is_read else values[0]


def _first_row(ids: Any) -> Hashable:
    """OmniGen takes the positions of all rows from the first, the scale from the last position."""
    return int(ids.max()), *ids.reshape(-1, ids.shape[-1])[0].tolist()


def _sizes(entries: Any) -> Hashable:
    """Z-Image pads control inputs to the widest row, and returns them padded."""
    return tuple(sorted({tuple(entry.shape) for entry in entries}))


def _lengths(texts: Any) -> Hashable:
    """Like `_sizes`: Z-Image pads each text to a multiple of 32 tokens."""
    return max(-(-len(text) // 32) for text in texts)


_ZIMAGE = {
    "x": LIST,  # each (16, 1, H / 8, W / 8): sizes may differ
    "t": STACK,  # (rows,), 0-1
    "cap_feats": LIST,  # each (text tokens, 2560): padded and masked inside
    **{"siglip_feats": LIST, "image_noise_mask": LIST},  # Omni: then all are lists of lists
}
_HUNYUAN_DIT = {
    "hidden_states": STACK,  # (rows, 4, H / 8, W / 8)
    "timestep": STACK,  # (rows,), 0-1000
    "encoder_hidden_states": STACK,  # (rows, 77, 1024)
    "text_embedding_mask": STACK,  # (rows, 77)
    "encoder_hidden_states_t5": STACK,  # (rows, 256, 2048)
    "text_embedding_mask_t5": STACK,  # (rows, 256)
    "image_meta_size": STACK,  # (rows, 6)
    "style": STACK,  # (rows,)
    "image_rotary_emb": SHARE,  # two of (image tokens, 88)
}
_SANA = {
    "hidden_states": STACK,  # (rows, 32, H / 32, W / 32)
    "timestep": STACK,  # (rows,)
    "encoder_hidden_states": Pad(mask="encoder_attention_mask"),  # (rows, <= 300, 2304)
    "encoder_attention_mask": Pad(mask="encoder_attention_mask"),  # (rows, <= 300)
}
_SD3 = {
    "hidden_states": STACK,  # (rows, 16, H / 8, W / 8)
    "timestep": STACK,  # (rows,), 0-1000
    "encoder_hidden_states": STACK,  # (rows, 77 + text tokens, 4096)
    "pooled_projections": STACK,  # (rows, 2048)
}
_QWEN_TEXT = Pad(mask="encoder_hidden_states_mask", makes_mask=True)
_QWEN = {  # img_shapes is a flag: [[(frames, height, width), ...]]; only its first entry is read
    "hidden_states": STACK,  # (rows, image tokens, 64), with reference images
    "timestep": STACK,  # (rows,), 0-1
    "encoder_hidden_states": _QWEN_TEXT,  # (rows, text tokens, 3584)
    "encoder_hidden_states_mask": _QWEN_TEXT,  # (rows, text tokens), or None: all ones
}
_FLUX = {
    "hidden_states": STACK,  # (rows, image tokens, 64)
    "timestep": STACK,  # (rows,), 0-1
    "guidance": STACK,  # (rows,), or None for models without guidance embedding
    "pooled_projections": STACK,  # (rows, 768)
    "encoder_hidden_states": STACK,  # (rows, text tokens, 4096): no mask, never padded
    "txt_ids": SHARE,  # (text tokens, 3)
    "img_ids": SHARE,  # (image tokens, 3): equal token counts may differ in geometry
}
_UNET: dict[str, Any] = {
    "sample": STACK,  # (rows, 4, H / 8, W / 8)
    "timestep": SCALAR,  # 0-d, or a number
    "encoder_hidden_states": STACK,  # (rows, 77, 768 or 2048)
    "timestep_cond": STACK,  # (rows, D) or None
    "added_cond_kwargs": {  # SDXL; else None
        "text_embeds": STACK,  # (rows, 1280)
        "time_ids": STACK,  # (rows, 6)
        "image_embeds": STACKS,  # one per IP-adapter (rows, images, 1024): ControlNets read none
    },
}
_CONTROL = {"controlnet_cond": STACK, "conditioning_scale": FACTOR}  # of the whole answer

SPECS: dict[tuple[str, str], Spec] = {
    ("ControlNetModel", "forward"): Spec(rules={**_UNET, **_CONTROL}),
    ("ErnieImageTransformer2DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 128, H / 16, W / 16)
        timestep=STACK,  # (rows,), 0-1000
        text_bth=Pad(mask="text_lens"),  # (rows, text tokens, 2560)
        text_lens=STACK,  # (rows,): masks the rest, and positions the image
    ),
    ("FluxTransformer2DModel", "forward"): Spec.of(
        **_FLUX,
        controlnet_block_samples=STACKS,  # each (rows, image tokens, 3072)
        controlnet_single_block_samples=STACKS,
    ),
    ("FluxControlNetModel", "forward"): Spec(
        "hidden_states", {**_FLUX, **_CONTROL, "controlnet_mode": STACK}
    ),
    ("Flux2Transformer2DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, image tokens, 128), with reference images
        timestep=STACK,  # (rows,), 0-1
        guidance=STACK,  # (rows,), or None for models without guidance embedding
        encoder_hidden_states=STACK,  # (rows, text tokens, 15360): no mask, never padded
        txt_ids=SHARE,  # (rows, text tokens, 4): only row 0 is read
        img_ids=SHARE,  # (rows, image tokens, 4): only row 0 is read
        # keys and values of reference tokens: the first forward makes them, others read them
        kv_cache=Own(unread=("num_ref_tokens",)),
    ),
    ("GlmImageTransformer2DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 16, H / 8, W / 8)
        timestep=STACK,  # (rows,), 0-1000
        # (rows, text tokens, 1472): the quoted text. Never padded: no mask is passed, and the
        # model's own mask, zeros and ones added to the scores, hides nothing
        encoder_hidden_states=STACK,
        prior_token_id=STACK,  # (rows, image tokens)
        prior_token_drop=STACK,  # (rows, image tokens): true without the prompt
        target_size=STACK,  # (rows, 2)
        crop_coords=STACK,  # (rows, 2)
        kv_caches=_GlmCaches(),
    ),
    ("HiDreamImageTransformer2DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 16, H / 8, W / 8), or (rows, image tokens, 64)
        timesteps=STACK,  # (rows,), 0-1000
        encoder_hidden_states_t5=STACK,  # (rows, text tokens, 4096): no mask, never padded
        encoder_hidden_states_llama3=LAYERS,  # (32 layers, rows, text tokens, 4096)
        pooled_embeds=STACK,  # (rows, 2048)
        img_ids=STACK,  # (rows, image tokens, 3), or None
        img_sizes=STACK,  # (rows, 2), or None
        hidden_states_masks=STACK,  # (rows, image tokens), or None
    ),
    ("HunyuanDiT2DControlNetModel", "forward"): Spec("hidden_states", {**_HUNYUAN_DIT, **_CONTROL}),
    ("HunyuanDiT2DModel", "forward"): Spec(
        "hidden_states", {**_HUNYUAN_DIT, "controlnet_block_samples": STACKS}
    ),
    ("LuminaNextDiT2DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 4, H / 8, W / 8)
        timestep=STACK,  # (rows,), 0-1
        encoder_hidden_states=STACK,  # (rows, 256, 2048): always padded
        encoder_mask=STACK,  # (rows, 256)
        image_rotary_emb=SHARE,  # (384, 384, 48): the same for all sizes
    ),
    ("Lumina2Transformer2DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 16, H / 8, W / 8)
        timestep=STACK,  # (rows,), 0-1
        encoder_hidden_states=Pad(mask="encoder_attention_mask"),  # (rows, 256, 2304)
        # (rows, 256): its sums position the image
        encoder_attention_mask=Pad(mask="encoder_attention_mask", places=True),
    ),
    ("OmniGenTransformer2DModel", "forward"): Spec.of(
        hidden_states=STACK,  # (rows, 4, H / 8, W / 8)
        timestep=STACK,  # (rows,), 0-1
        input_ids=STACK,  # (rows, text tokens): padding would need masks
        attention_mask=STACK,  # (rows, tokens, tokens)
        position_ids=Keyed(STACK, _first_row),  # (rows, tokens)
        # input images: keyed by the number of their row
        input_img_latents=State(lambda latents: None if latents else "no picture"),
    ),
    ("QwenImageControlNetModel", "forward"): Spec("hidden_states", {**_QWEN, **_CONTROL}),
    ("QwenImageTransformer2DModel", "forward"): Spec.of(
        **_QWEN,
        additional_t_cond=STACK,  # (rows,), for layered models
        controlnet_block_samples=STACKS,  # each (rows, image tokens, 3072)
    ),
    ("QwenImage21Transformer2DModel", "forward"): Spec(
        rules={
            "hidden_states": STACK,  # (rows, image tokens, 64), with input images
            "timestep": Own(if_exact=True),  # (rows,), 0-1; the prompt's time 0 is appended
            # (rows, text tokens, 4096), read only by the first forward: no mask, never padded
            "encoder_hidden_states": Prefix(STACK),
            "encoder_hidden_states_mask": _OF_ONE_REQUEST,  # only where one request pads texts
            "img_mask": Prefix(SHARE),  # (1, tokens): only row 0 is read
            "kv_cache": Own(),
        },
        within=own_positions,
    ),
    ("SD3ControlNetModel", "forward"): Spec("hidden_states", {**_SD3, **_CONTROL}),
    ("SD3Transformer2DModel", "forward"): Spec(
        "hidden_states", {**_SD3, "block_controlnet_hidden_states": STACKS}
    ),
    ("SanaControlNetModel", "forward"): Spec("hidden_states", {**_SANA, **_CONTROL}),
    ("SanaTransformer2DModel", "forward"): Spec.of(
        **_SANA,
        guidance=STACK,  # (rows,), SANA Sprint only
        controlnet_block_samples=STACKS,  # each (rows, image tokens, width)
    ),
    ("UNet1DModel", "forward"): Spec.of(sample=STACK, timestep=SCALAR),  # (rows, 2, samples)
    ("UNet2DConditionModel", "forward"): Spec.of(
        **_UNET,
        down_block_additional_residuals=STACKS,  # ControlNet's, one a layer
        mid_block_additional_residual=STACK,
        down_intrablock_additional_residuals=STACKS,  # a T2I-adapter's
    ),
    ("ZImageControlNetModel", "forward"): Spec.of(
        **{**_ZIMAGE, "x": Keyed(LIST, _sizes), "cap_feats": Keyed(LIST, _lengths)},
        control_context=LIST,  # each (33, 1, H / 8, W / 8)
        conditioning_scale=FACTOR,
    ),
    ("ZImageTransformer2DModel", "forward"): Spec(
        rules={**_ZIMAGE, "controlnet_block_samples": STACKS},  # layers of (rows, tokens, 3840)
        returns_list=True,
    ),
}
