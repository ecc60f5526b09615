"""Parts that tiny checkpoints share: text encoders, tokenizers, VAEs, and how weights are drawn.

The weights are random but not as the libraries draw them: those leave layers at zero
and signals so faint that a lost prompt goes unnoticed. `drawn` gives every weight the
size that keeps its signal near one, so each argument of a call shows in the image.
"""

from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKL
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

TOKENIZERS = Path(__file__).parent / "tokenizers"
CLIP_WIDTH = 32

M = TypeVar("M", bound=nn.Module)


def drawn(module: M, *, last: str | None = None, gain: float = 1.0) -> M:
    """Redraw the weights of `module` in place so that every signal stays near one.

    Matrices and kernels get a standard deviation of 1/sqrt(inputs), embeddings of 1.0,
    biases of 0.1; every other parameter stays as its library drew it.

    Args:
        module: any model, or a part of one.
        last: the path of its output layer, to be multiplied by `gain`: below one for
            pixels, which are clamped to -1..1, and for denoisers, whose rounding errors
            (1e-6 for outputs near one) would grow from step to step.
        gain: the factor for `last`.
    """
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.weight.normal_()
            elif isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                part.weight.normal_(std=part.weight[0].numel() ** -0.5)
                if part.bias is not None:
                    part.bias.normal_(std=0.1)
        if last is not None:
            for parameter in module.get_submodule(last).parameters():
                parameter.mul_(gain)
    return module


def clip_tokenizer() -> CLIPTokenizer:
    """Load the tokenizer of every CLIP here."""
    tokenizer: CLIPTokenizer = CLIPTokenizer.from_pretrained(TOKENIZERS / "clip")
    return tokenizer


def clip_config() -> CLIPTextConfig:
    """Describe a CLIP text encoder; its pooled vector is `CLIP_WIDTH` wide, projected or not."""
    tokenizer = clip_tokenizer()
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=CLIP_WIDTH,
        intermediate_size=37,
        projection_dim=CLIP_WIDTH,
        num_attention_heads=4,
        num_hidden_layers=3,
    )


def clip() -> CLIPTextModel:
    """Draw a CLIP text encoder."""
    return drawn(CLIPTextModel(clip_config()))


def projected_clip() -> CLIPTextModelWithProjection:
    """Draw a CLIP text encoder whose pooled vector is projected."""
    return drawn(CLIPTextModelWithProjection(clip_config()))


def t5_tokenizer() -> T5TokenizerFast:
    """Load the tokenizer of every T5 here."""
    tokenizer: T5TokenizerFast = T5TokenizerFast.from_pretrained(TOKENIZERS / "t5")
    return tokenizer


def t5(width: int) -> T5EncoderModel:
    """Draw a T5 encoder with embeddings `width` wide."""
    config = T5Config(
        vocab_size=len(t5_tokenizer()),
        d_model=width,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return drawn(T5EncoderModel(config))


def kl_vae(**config: Any) -> AutoencoderKL:
    """Draw a VAE with 4 latent channels that shrinks each side by 2."""
    vae = AutoencoderKL(
        sample_size=64,
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        **config,
    )
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def flow_vae() -> AutoencoderKL:
    """Draw the VAE of the flow-matching families: shifted latents, no 1x1 convolutions."""
    return kl_vae(
        use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5
    )
