"""Denoisers of image models."""

from carpool.engine.specs.rules import SCALAR, SHARE, STACK, STACKS, Pad, Spec

SPECS: dict[tuple[str, str], Spec] = {
    ("FluxTransformer2DModel", "forward"): Spec(
        rows="hidden_states",
        rules={
            "hidden_states": STACK,  # (rows, image tokens, 64)
            "timestep": STACK,  # (rows,), 0-1
            "guidance": STACK,  # (rows,), or None for models without guidance embedding
            "pooled_projections": STACK,  # (rows, 768)
            "encoder_hidden_states": STACK,  # (rows, text tokens, 4096): no mask, never padded
            "txt_ids": SHARE,  # (text tokens, 3)
            "img_ids": SHARE,  # (image tokens, 3): equal token counts may differ in geometry
        },
    ),
    ("SD3Transformer2DModel", "forward"): Spec(
        rows="hidden_states",
        rules={
            "hidden_states": STACK,  # (rows, 16, H / 8, W / 8)
            "timestep": STACK,  # (rows,), 0-1000
            "encoder_hidden_states": STACK,  # (rows, 77 + text tokens, 4096)
            "pooled_projections": STACK,  # (rows, 2048)
        },
    ),
    ("SanaTransformer2DModel", "forward"): Spec(
        rows="hidden_states",
        rules={
            "hidden_states": STACK,  # (rows, 32, H / 32, W / 32)
            "timestep": STACK,  # (rows,)
            "guidance": STACK,  # (rows,), only of SANA Sprint
            "encoder_hidden_states": Pad(mask="encoder_attention_mask"),  # (rows, <= 300, 2304)
            "encoder_attention_mask": Pad(mask="encoder_attention_mask"),  # (rows, <= 300)
            "controlnet_block_samples": STACKS,  # each (rows, image tokens, width)
        },
    ),
    ("UNet2DConditionModel", "forward"): Spec(
        rows="sample",
        rules={
            "sample": STACK,  # (rows, 4, H / 8, W / 8)
            "timestep": SCALAR,  # 0-d, or a number
            "encoder_hidden_states": STACK,  # (rows, 77, 768 or 2048)
            "timestep_cond": STACK,  # (rows, D) or None
            "added_cond_kwargs": {"text_embeds": STACK, "time_ids": STACK},  # SDXL; else None
        },
    ),
}
