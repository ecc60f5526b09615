"""Wan 2.1 and 2.2: text-to-video and image-to-video, with one expert or two."""

from typing import Any

import diffusers
import transformers

from support.tiny.parts import drawn, t5_tokenizer

TEXT_WIDTH = 32
_WIDTH = 24  # of the denoiser: 2 heads of 12
_IMAGE_WIDTH = 8


def umt5() -> transformers.UMT5EncoderModel:
    """Draw a UMT5 encoder with embeddings `TEXT_WIDTH` wide."""
    config = transformers.UMT5Config(
        vocab_size=len(t5_tokenizer()), d_model=TEXT_WIDTH, d_kv=8, d_ff=37, num_layers=2,
        num_heads=4,
    )  # fmt: skip
    return drawn(transformers.UMT5EncoderModel(config))


def wan_vae(**config: Any) -> diffusers.AutoencoderKLWan:
    """Draw a causal VAE that shrinks each side by 8 and time by 4; 16 channels if not said."""
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True], **config,
    )  # fmt: skip
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def _wide_vae() -> diffusers.AutoencoderKLWan:
    """Draw the VAE of Wan 2.2 5B: pixels in patches, 48 channels, sides by 16."""
    return wan_vae(
        z_dim=48, in_channels=12, out_channels=12, is_residual=True, patch_size=2,
        scale_factor_spatial=16, latents_mean=[0.1] * 48, latents_std=[1.5] * 48,
    )  # fmt: skip


def _transformer(
    channels: int, out: int | None = None, **config: Any
) -> diffusers.WanTransformer3DModel:
    """Draw a denoiser of latents with so many channels, reading each word sharply."""
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=channels,
        out_channels=out or channels, text_dim=TEXT_WIDTH, freq_dim=64, ffn_dim=32, num_layers=2,
        rope_max_seq_len=64, **config,
    )  # fmt: skip
    return drawn(transformer, last="proj_out", gain=0.3)


def _scheduler() -> diffusers.UniPCMultistepScheduler:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def _parts() -> dict[str, Any]:
    return {"tokenizer": t5_tokenizer(), "text_encoder": umt5(), "scheduler": _scheduler()}


def wan21_t2v() -> diffusers.WanPipeline:
    """Wan 2.1: whole timesteps, one each row."""
    return diffusers.WanPipeline(**_parts(), vae=wan_vae(), transformer=_transformer(16))


def wan22_t2v_a14b() -> diffusers.WanPipeline:
    """Wan 2.2 A14B: one expert for the first steps and one for the last."""
    return diffusers.WanPipeline(
        **_parts(), vae=wan_vae(), transformer=_transformer(16), transformer_2=_transformer(16),
        boundary_ratio=0.875,
    )  # fmt: skip


def wan22_ti2v_5b() -> diffusers.WanPipeline:
    """Wan 2.2 5B: a timestep for each token."""
    return diffusers.WanPipeline(
        **_parts(), vae=_wide_vae(), transformer=_transformer(48), expand_timesteps=True
    )


def wan21_i2v() -> diffusers.WanImageToVideoPipeline:
    """Wan 2.1 I2V: the first picture as extra channels, and as CLIP sees it."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=_IMAGE_WIDTH, num_hidden_layers=3, num_attention_heads=2, image_size=32,
        intermediate_size=16, patch_size=16,
    )  # fmt: skip
    return diffusers.WanImageToVideoPipeline(
        **_parts(),
        vae=wan_vae(),
        image_processor=transformers.CLIPImageProcessor(crop_size=32, size=32),
        image_encoder=drawn(transformers.CLIPVisionModel(vision)),
        transformer=_transformer(36, 16, image_dim=_IMAGE_WIDTH, added_kv_proj_dim=_WIDTH),
    )


def wan22_i2v_a14b() -> diffusers.WanImageToVideoPipeline:
    """Wan 2.2 I2V A14B: two experts, the first picture as extra channels only."""
    return diffusers.WanImageToVideoPipeline(
        **_parts(), vae=wan_vae(), transformer=_transformer(36, 16),
        transformer_2=_transformer(36, 16), boundary_ratio=0.9,
    )  # fmt: skip


FAMILIES = {
    "wan21_t2v": wan21_t2v, "wan22_t2v_a14b": wan22_t2v_a14b, "wan22_ti2v_5b": wan22_ti2v_5b,
    "wan21_i2v": wan21_i2v, "wan22_i2v_a14b": wan22_i2v_a14b,
}  # fmt: skip

_VIDEO: dict[str, Any] = {
    "height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 3, "max_sequence_length": 32,
    "output_type": "pt",
}  # fmt: skip
ARGUMENTS = {
    "wan21_t2v": _VIDEO,
    "wan22_t2v_a14b": _VIDEO,
    "wan22_ti2v_5b": {**_VIDEO, "height": 64, "width": 96},
    "wan21_i2v": {**_VIDEO, "max_sequence_length": 512},  # the model counts on 512
    "wan22_i2v_a14b": _VIDEO,
}
