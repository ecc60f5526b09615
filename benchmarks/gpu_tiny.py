"""The same models with a few thousand weights, for `gpu_page --tiny` on a CPU."""

from dataclasses import replace
from typing import Any

from benchmarks.gpu_models import MODELS, Config, Model, Size

WIDTH = 32  # width of text embeddings
STEPS = (2, 3)  # Qwen-Image's scheduler divides by zero at one step
KL = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 8),
    "layers_per_block": 1,
    "norm_num_groups": 1,
    "latent_channels": 4,
}
CAUSAL = {
    "base_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
}
DEEP = ("ResBlock", "ResBlock", "EfficientViTBlock")

DENOISERS: dict[str, Config] = {
    "flux": {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": WIDTH,
        "pooled_projection_dim": WIDTH,
        "axes_dims_rope": (4, 4, 8),
    },
    "qwen-image": {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": WIDTH,
        "axes_dims_rope": (8, 4, 4),
    },
    "z-image": {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": WIDTH,
        "axes_dims": [8, 4, 4],
        "axes_lens": [256, 64, 64],
    },
    "sana": {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": WIDTH,
    },
    "sd35-medium": {
        "sample_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": WIDTH,
        "pooled_projection_dim": WIDTH,
        "dual_attention_layers": (0,),
        "pos_embed_max_size": 32,
    },
    "sdxl": {
        "sample_size": 32,
        "block_out_channels": (4, 8),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 1,
        "attention_head_dim": (2, 4),
        "transformer_layers_per_block": (1, 1),
        "cross_attention_dim": WIDTH,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + WIDTH,
    },
    "wan": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "text_dim": WIDTH,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 1,
    },
}
VAES: dict[str, Config] = {
    "qwen-image": {
        **CAUSAL,
        "z_dim": 4,
        "latents_mean": [0.2, -0.3, 0.2, -0.3],
        "latents_std": [1.5, 0.8, 1.5, 0.8],
    },
    "sana": {
        "latent_channels": 4,
        "attention_head_dim": 4,
        "encoder_block_types": DEEP,
        "decoder_block_types": DEEP,
        "encoder_block_out_channels": (4, 8, 8),
        "decoder_block_out_channels": (4, 8, 8),
        "encoder_layers_per_block": (1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1),
        "encoder_qkv_multiscales": ((), (), (5,)),
        "decoder_qkv_multiscales": ((), (), (5,)),
    },
    "wan": {**CAUSAL, "dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True]},
}


def tiny(name: str) -> Model:
    """A model of `MODELS` with small parts and small requests."""
    model = MODELS[name]
    denoiser, config = model.denoiser
    vae, vae_config = model.vae
    sizes = (Size(32, 32, 5),) if name == "wan" else (Size(64, 64),)
    return replace(
        model,
        denoiser=(denoiser, {**config, **DENOISERS[name]}),
        vae=(vae, {**vae_config, **VAES.get(name, KL)}),
        texts={text: _small(text, shape, model) for text, shape in model.texts.items()},
        sizes=sizes,
        steps=STEPS,
    )


def _small(text: str, shape: tuple[int, ...], model: Model) -> Any:
    if "mask" in text:
        return (1, 24)
    if "pooled" in text:
        return (1, WIDTH)
    return (24, WIDTH) if model.is_listed else (1, 24, WIDTH)
