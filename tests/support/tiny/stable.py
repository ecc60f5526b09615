"""FLUX.1, Stable Diffusion 3, XL and 1.5."""

from typing import Any

import diffusers

from support.tiny.parts import (
    CLIP_WIDTH,
    clip,
    clip_tokenizer,
    drawn,
    flow_vae,
    kl_vae,
    projected_clip,
    t5,
    t5_tokenizer,
)


def flux() -> diffusers.FluxPipeline:
    """Flux.1 dev: guidance is embedded, the text padded to `max_sequence_length`."""
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=flow_vae(),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5(32),
        tokenizer_2=t5_tokenizer(),
        transformer=drawn(
            diffusers.FluxTransformer2DModel(
                patch_size=1,
                in_channels=16,  # 4 latent channels of 2x2 latent pixels
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                pooled_projection_dim=CLIP_WIDTH,
                axes_dims_rope=(4, 4, 8),
                guidance_embeds=True,
            ),
            last="proj_out",
            gain=0.3,
        ),
    )


def sd3() -> diffusers.StableDiffusion3Pipeline:
    """Stable Diffusion 3: three text encoders, both halves of guidance in one call."""
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=flow_vae(),
        text_encoder=projected_clip(), tokenizer=clip_tokenizer(), text_encoder_2=projected_clip(),
        tokenizer_2=clip_tokenizer(), text_encoder_3=t5(2 * CLIP_WIDTH), tokenizer_3=t5_tokenizer(),
        transformer=drawn(
            diffusers.SD3Transformer2DModel(
                sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
                attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32,
                joint_attention_dim=2 * CLIP_WIDTH, pooled_projection_dim=2 * CLIP_WIDTH,
                pos_embed_max_size=32,
            ),
            last="proj_out", gain=0.3,
        ),
    )  # fmt: skip


def unet(**config: Any) -> diffusers.UNet2DConditionModel:
    """Draw a UNet of two levels, the lower one reading the text."""
    return drawn(
        diffusers.UNet2DConditionModel(
            sample_size=32, in_channels=4, out_channels=4, block_out_channels=(4, 8),
            layers_per_block=1, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), norm_num_groups=1, **config,
        ),
        last="conv_out", gain=0.3,
    )  # fmt: skip


def sdxl() -> diffusers.StableDiffusionXLPipeline:
    """Stable Diffusion XL: two text encoders, a pooled vector and six sizes per row."""
    sizes_width = 8
    return diffusers.StableDiffusionXLPipeline(
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
            timestep_spacing="leading", steps_offset=1,
        ),
        vae=kl_vae(scaling_factor=0.13), text_encoder=clip(), tokenizer=clip_tokenizer(),
        text_encoder_2=projected_clip(), tokenizer_2=clip_tokenizer(),
        unet=unet(
            attention_head_dim=(2, 4), use_linear_projection=True,
            transformer_layers_per_block=(1, 1), addition_embed_type="text_time",
            addition_time_embed_dim=sizes_width,
            projection_class_embeddings_input_dim=6 * sizes_width + CLIP_WIDTH,
            cross_attention_dim=2 * CLIP_WIDTH,
        ),
    )  # fmt: skip


def sd15() -> diffusers.StableDiffusionPipeline:
    """Stable Diffusion 1.5: one text encoder, a scheduler with a history, no safety checker."""
    return diffusers.StableDiffusionPipeline(
        scheduler=diffusers.PNDMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True,
            steps_offset=1,
        ),
        vae=kl_vae(), text_encoder=clip(), tokenizer=clip_tokenizer(),
        unet=unet(attention_head_dim=2, cross_attention_dim=CLIP_WIDTH), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


FAMILIES = {"flux": flux, "sd3": sd3, "sdxl": sdxl, "sd15": sd15}

_IMAGE: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "pt"}
ARGUMENTS = {
    "flux": {**_IMAGE, "max_sequence_length": 48},
    "sd3": {**_IMAGE, "max_sequence_length": 32},
    "sdxl": _IMAGE,
    "sd15": _IMAGE,
}
