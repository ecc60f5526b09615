"""Parts that tiny checkpoints share: text encoders, tokenizers, VAEs, and how weights are drawn.

The weights are random but not as the libraries draw them: those leave layers at zero
and signals so faint that a lost prompt goes unnoticed. `drawn` gives every weight the
size that keeps its signal near one, so each argument of a call shows in the image.
"""

from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

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


def sharpened(module: M, factor: float = 3.0) -> M:
    """Scale the normed queries of `module` in place, so that attention picks out few tokens.

    Where nothing but attention carries the text into the picture, an even look at all tokens
    leaves of a prompt only a mean that is much the same for any.
    """
    with torch.no_grad():
        for name, part in module.named_modules():
            if name.endswith("norm_q"):
                part.get_parameter("weight").mul_(factor)
    return module


def clip_tokenizer() -> transformers.CLIPTokenizer:
    """Load the tokenizer of every CLIP here."""
    tokenizer: transformers.CLIPTokenizer = transformers.CLIPTokenizer.from_pretrained(
        TOKENIZERS / "clip"
    )
    return tokenizer


def clip_config() -> transformers.CLIPTextConfig:
    """Describe a CLIP text encoder; its pooled vector is `CLIP_WIDTH` wide, projected or not."""
    tokenizer = clip_tokenizer()
    return transformers.CLIPTextConfig(
        vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        hidden_size=CLIP_WIDTH, intermediate_size=37, projection_dim=CLIP_WIDTH,
        num_attention_heads=4, num_hidden_layers=3,
    )  # fmt: skip


def clip() -> transformers.CLIPTextModel:
    """Draw a CLIP text encoder."""
    return drawn(transformers.CLIPTextModel(clip_config()))


def projected_clip() -> transformers.CLIPTextModelWithProjection:
    """Draw a CLIP text encoder whose pooled vector is projected."""
    return drawn(transformers.CLIPTextModelWithProjection(clip_config()))


def t5_tokenizer() -> transformers.T5TokenizerFast:
    """Load the tokenizer of every T5 here."""
    tokenizer: transformers.T5TokenizerFast = transformers.T5TokenizerFast.from_pretrained(
        TOKENIZERS / "t5"
    )
    return tokenizer


def t5(width: int, vocab_size: int | None = None) -> transformers.T5EncoderModel:
    """Draw a T5 encoder with embeddings `width` wide, for `t5_tokenizer` if nothing is said."""
    config = transformers.T5Config(
        vocab_size=vocab_size or len(t5_tokenizer()), d_model=width, d_kv=8, d_ff=37, num_layers=2,
        num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    return drawn(transformers.T5EncoderModel(config))


def gemma_tokenizer() -> transformers.GemmaTokenizer:
    """Load the tokenizer of every Gemma here; it pads on the left, until a pipeline says right."""
    tokenizer: transformers.GemmaTokenizer = transformers.GemmaTokenizer.from_pretrained(
        TOKENIZERS / "gemma"
    )
    return tokenizer


def llama_tokenizer() -> transformers.LlamaTokenizer:
    """Load the tokenizer of every Llama here."""
    tokenizer: transformers.LlamaTokenizer = transformers.LlamaTokenizer.from_pretrained(
        TOKENIZERS / "llama"
    )
    return tokenizer


def qwen2_tokenizer() -> transformers.Qwen2Tokenizer:
    """Load the tokenizer of every chat model here; it has a chat template."""
    tokenizer: transformers.Qwen2Tokenizer = transformers.Qwen2Tokenizer.from_pretrained(
        TOKENIZERS / "qwen2"
    )
    return tokenizer


_SMALL_VAE: dict[str, Any] = {
    "sample_size": 64, "block_out_channels": (4, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 1,
}  # fmt: skip


def kl_vae(**config: Any) -> AutoencoderKL:
    """Draw a VAE with 4 latent channels that shrinks each side by 2."""
    vae = AutoencoderKL(**_SMALL_VAE, **config)
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def flow_vae() -> AutoencoderKL:
    """Draw the VAE of the flow-matching families: shifted latents, no 1x1 convolutions."""
    return kl_vae(
        use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5
    )


def flux2_vae() -> AutoencoderKLFlux2:
    """Draw the VAE of FLUX.2 and ERNIE-Image: 2x2 latents are normed by statistics of its own."""
    vae = AutoencoderKLFlux2(**_SMALL_VAE, use_quant_conv=False, use_post_quant_conv=False)
    nn.init.normal_(vae.bn.running_mean, std=0.1)
    nn.init.uniform_(vae.bn.running_var, 0.5, 1.5)
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def roberta_tokenizer() -> transformers.RobertaTokenizer:
    """Build a tokenizer whose words are bytes."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    return transformers.RobertaTokenizer(vocab=vocab, merges=[], model_max_length=77)
