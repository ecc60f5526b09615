"""Pipelines of pictures whose denoisers have no table: how they fuse is inferred."""

from typing import Any

import diffusers
from transformers import GlmConfig, GlmModel, Qwen3Config, Qwen3Model

from support.tiny.parts import (
    drawn,
    flow_vae,
    gemma_tokenizer,
    kl_vae,
    qwen2_tokenizer,
    t5,
    t5_tokenizer,
)
from support.tiny.sana import gemma

_WIDTH = 32  # of the text's embeddings


def lumina2() -> diffusers.Lumina2Pipeline:
    """Lumina 2: reads the lengths of its texts, and places each row by its own."""
    return diffusers.Lumina2Pipeline(
        transformer=drawn(diffusers.Lumina2Transformer2DModel(
            sample_size=16, patch_size=2, in_channels=4, hidden_size=32, num_layers=2,
            num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1, multiple_of=16,
            axes_dim_rope=(4, 4, 8), axes_lens=(300, 64, 64), cap_feat_dim=_WIDTH,
        )),
        vae=flow_vae(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), text_encoder=gemma(),
        tokenizer=gemma_tokenizer(),
    )  # fmt: skip


def chroma() -> diffusers.ChromaPipeline:
    """Chroma: Flux without guidance embedding, with a text mask."""
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), text_encoder=t5(_WIDTH),
        tokenizer=t5_tokenizer(),
        transformer=drawn(
            diffusers.ChromaTransformer2DModel(
                patch_size=1, in_channels=16, num_layers=1, num_single_layers=1,
                attention_head_dim=16, num_attention_heads=2, joint_attention_dim=_WIDTH,
                axes_dims_rope=(4, 4, 8), approximator_hidden_dim=32, approximator_layers=1,
                approximator_num_channels=16,
            ),
            last="proj_out", gain=0.3,
        ),
        vae=flow_vae(),
    )  # fmt: skip


def cogview3() -> diffusers.CogView3PlusPipeline:
    """CogView 3+: sizes and crops are read beside the text."""
    return diffusers.CogView3PlusPipeline(
        transformer=drawn(
            diffusers.CogView3PlusTransformer2DModel(
                patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16,
                num_attention_heads=2, out_channels=4, text_embed_dim=_WIDTH, time_embed_dim=16,
                condition_dim=8, pos_embed_max_size=32, sample_size=32,
            ),
            last="proj_out", gain=0.3,
        ),
        vae=kl_vae(), scheduler=diffusers.CogVideoXDDIMScheduler(), text_encoder=t5(_WIDTH),
        tokenizer=t5_tokenizer(),
    )  # fmt: skip


def cogview4() -> diffusers.CogView4Pipeline:
    """CogView 4: guidance by two calls."""
    tokenizer = qwen2_tokenizer()
    tokenizer.padding_side = "left"
    encoder = GlmModel(GlmConfig(
        vocab_size=len(tokenizer), pad_token_id=0, hidden_size=_WIDTH, intermediate_size=37,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ))  # fmt: skip
    return diffusers.CogView4Pipeline(
        transformer=drawn(
            diffusers.CogView4Transformer2DModel(
                patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16,
                num_attention_heads=2, out_channels=4, text_embed_dim=_WIDTH, time_embed_dim=16,
                condition_dim=8,
            ),
            last="proj_out", gain=0.3,
        ),
        vae=kl_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True,
            time_shift_type="linear",
        ),
        text_encoder=drawn(encoder), tokenizer=tokenizer,
    )  # fmt: skip


def bria() -> diffusers.BriaPipeline:
    """Bria: both halves of guidance in one call, text before the picture."""
    return diffusers.BriaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), text_encoder=t5(_WIDTH),
        tokenizer=t5_tokenizer(),
        transformer=drawn(
            diffusers.BriaTransformer2DModel(
                patch_size=1, in_channels=16, num_layers=1, num_single_layers=1,
                attention_head_dim=8, num_attention_heads=2, joint_attention_dim=_WIDTH,
                pooled_projection_dim=None, axes_dims_rope=[0, 4, 4],
            ),
            last="proj_out", gain=0.3,
        ),
        vae=kl_vae(shift_factor=0, scaling_factor=0.13),
    )  # fmt: skip


def kandinsky3() -> diffusers.Kandinsky3Pipeline:
    """Kandinsky 3: a U-Net with a text mask, a scheduler that draws noise at each step."""
    movq = diffusers.VQModel(
        block_out_channels=[32, 64],
        down_block_types=["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
        up_block_types=["AttnUpDecoderBlock2D", "UpDecoderBlock2D"], latent_channels=4,
        layers_per_block=1, norm_num_groups=4, norm_type="spatial", num_vq_embeddings=12,
        vq_embed_dim=4,
    )  # fmt: skip
    return diffusers.Kandinsky3Pipeline(
        tokenizer=t5_tokenizer(), text_encoder=t5(_WIDTH),
        unet=drawn(
            diffusers.Kandinsky3UNet(
                in_channels=4, time_embedding_dim=4, groups=2, attention_head_dim=4,
                layers_per_block=3, block_out_channels=(32, 64), cross_attention_dim=4,
                encoder_hid_dim=_WIDTH,
            ),
            last="conv_out", gain=0.3,
        ),
        scheduler=diffusers.DDPMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="squaredcos_cap_v2", clip_sample=True,
        ),
        movq=drawn(movq),
    )  # fmt: skip


def ovis() -> diffusers.OvisImagePipeline:
    """Ovis-Image: like Flux, with a language model's text."""
    tokenizer = qwen2_tokenizer()
    encoder = Qwen3Model(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=_WIDTH, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    ))  # fmt: skip
    return diffusers.OvisImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=flow_vae(),
        text_encoder=drawn(encoder), tokenizer=tokenizer,
        transformer=drawn(
            diffusers.OvisImageTransformer2DModel(
                patch_size=1, in_channels=16, out_channels=16, num_layers=1, num_single_layers=1,
                attention_head_dim=16, num_attention_heads=2, joint_attention_dim=_WIDTH,
                axes_dims_rope=(4, 4, 8),
            ),
            last="proj_out", gain=0.3,
        ),
    )  # fmt: skip


FAMILIES = {
    "lumina2": lumina2, "chroma": chroma, "cogview3": cogview3, "cogview4": cogview4, "bria": bria,
    "kandinsky3": kandinsky3, "ovis": ovis,
}  # fmt: skip
_SMALL: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 3, "output_type": "pt"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "lumina2": {**_SMALL, "max_sequence_length": 48, "system_prompt": "draw"},
    "chroma": {**_SMALL, "max_sequence_length": 32},
    "cogview3": {**_SMALL, "max_sequence_length": 24},
    "cogview4": {**_SMALL, "max_sequence_length": 32},
    "bria": {**_SMALL, "max_sequence_length": 32},
    "kandinsky3": dict(_SMALL),
    "ovis": {**_SMALL, "max_sequence_length": 32},
}
