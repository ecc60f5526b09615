"""Helios: video in chunks that see what came before, in one stage or as a pyramid."""

from typing import Any

import diffusers

from support.tiny.parts import drawn, t5_tokenizer
from support.tiny.wan import TEXT_WIDTH, umt5

_GAMMA = 0.3  # with the default, a third, the covariance of the block noise is singular in float32


def _vae() -> diffusers.AutoencoderKLWan:
    """Draw a causal VAE that shrinks sides and time by 4: the pyramid halves the latents twice."""
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[True, True],
        scale_factor_spatial=4,
    )  # fmt: skip
    drawn(vae, last="quant_conv", gain=4.0)  # or pictures look alike
    drawn(vae.decoder, last="conv_out", gain=0.5)
    return vae


def _parts() -> dict[str, Any]:
    transformer = diffusers.HeliosTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=TEXT_WIDTH, freq_dim=64, ffn_dim=32,
        num_layers=2, rope_dim=(4, 4, 4),
    )  # fmt: skip
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": umt5(),
        "vae": _vae(),
        "transformer": drawn(transformer, last="proj_out", gain=0.3),
    }


def helios_base() -> diffusers.HeliosPipeline:
    """Helios Base: one stage, timesteps in float64."""
    scheduler = diffusers.HeliosScheduler(stages=1, stage_range=[0, 1], use_dynamic_shifting=True)
    return diffusers.HeliosPipeline(**_parts(), scheduler=scheduler)


def helios_mid() -> diffusers.HeliosPyramidPipeline:
    """Helios Mid: three stages, each twice as large as the one before."""
    scheduler = diffusers.HeliosScheduler(gamma=_GAMMA)
    return diffusers.HeliosPyramidPipeline(**_parts(), scheduler=scheduler, is_cfg_zero_star=True)


def helios_distilled() -> diffusers.HeliosPyramidPipeline:
    """Helios Distilled: three stages without guidance, noised anew at each step."""
    scheduler = diffusers.HeliosDMDScheduler(gamma=_GAMMA)
    return diffusers.HeliosPyramidPipeline(**_parts(), scheduler=scheduler, is_distilled=True)


FAMILIES = {
    "helios_base": helios_base,
    "helios_mid": helios_mid,
    "helios_distilled": helios_distilled,
}

_CHUNK: dict[str, Any] = {
    "num_latent_frames_per_chunk": 2,
    "num_frames": 5,
    "max_sequence_length": 32,
    "output_type": "pt",
}
_PYRAMID = {**_CHUNK, "height": 64, "width": 64, "pyramid_num_inference_steps_list": [2, 2, 2]}
ARGUMENTS = {
    "helios_base": {**_CHUNK, "height": 32, "width": 48, "num_inference_steps": 3},
    "helios_mid": _PYRAMID,
    "helios_distilled": {**_PYRAMID, "guidance_scale": 1.0},
}
