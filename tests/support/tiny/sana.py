"""SANA and SANA 1.5."""

import diffusers
from transformers import Gemma2Config, Gemma2Model

from support.tiny.parts import drawn, gemma_tokenizer

_WIDTH = 32  # of the text's embeddings


def gemma() -> Gemma2Model:
    """Draw a Gemma 2 that is read as a text encoder."""
    tokenizer = gemma_tokenizer()
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=_WIDTH, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return drawn(Gemma2Model(config))


def deep_vae() -> diffusers.AutoencoderDC:
    """Draw a deep compression autoencoder: no distribution, linear attention, factor 4."""
    blocks = ("ResBlock", "ResBlock", "EfficientViTBlock")
    vae = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=4, encoder_block_types=blocks,
        decoder_block_types=blocks, encoder_block_out_channels=(4, 8, 8),
        decoder_block_out_channels=(4, 8, 8), encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1), encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)), downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu",
        scaling_factor=0.41407,
    )  # fmt: skip
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def _sana(qk_norm: str | None) -> diffusers.SanaPipeline:
    return diffusers.SanaPipeline(
        tokenizer=gemma_tokenizer(), text_encoder=gemma(), vae=deep_vae(),
        transformer=drawn(
            diffusers.SanaTransformer2DModel(
                in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2,
                attention_head_dim=16, num_cross_attention_heads=2, cross_attention_head_dim=16,
                cross_attention_dim=32, caption_channels=_WIDTH, sample_size=32, qk_norm=qk_norm,
            ),
            last="proj_out", gain=0.3,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0,
        ),
    )  # fmt: skip


def sana() -> diffusers.SanaPipeline:
    """SANA: cross-attention to masked text, linear attention within the picture."""
    return _sana(None)


def sana15() -> diffusers.SanaPipeline:
    """SANA 1.5: queries and keys are normed."""
    return _sana("rms_norm_across_heads")


FAMILIES = {"sana": sana, "sana15": sana15}

_SANA = {
    "height": 64,
    "width": 64,
    "num_inference_steps": 3,
    "max_sequence_length": 24,
    "use_resolution_binning": False,
    "complex_human_instruction": [],  # the default has 500 tokens
    "output_type": "pt",
}
ARGUMENTS = {"sana": _SANA, "sana15": _SANA}
