"""FLUX.1 Kontext, FLUX.2 and its smaller kin, Klein."""

from typing import Any

import diffusers
import torch
import transformers

from support.tiny.parts import drawn, qwen2_tokenizer, sharpened
from support.tiny.stable import flux

_WIDTH = 16  # of a layer of the text encoder; the transformer reads three of them
_LAYERS = (1, 2, 3)  # the real ones are 10, 20, 30 or 9, 18, 27


def kontext() -> diffusers.FluxKontextPipeline:
    """FLUX.1 Kontext: the picture to change rides behind the noise."""
    return diffusers.FluxKontextPipeline(**flux().components)


def batch_normed_vae() -> diffusers.AutoencoderKLFlux2:
    """Draw the VAE of FLUX.2: 4 channels, factor 4, latents normed by what a batch norm saw."""
    vae = diffusers.AutoencoderKLFlux2(
        sample_size=64, block_out_channels=(4, 8, 8), down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3, layers_per_block=1, latent_channels=4,
        norm_num_groups=1,
    )  # fmt: skip
    vae.bn.running_mean.normal_(std=0.2)
    vae.bn.running_var.uniform_(0.5, 1.5)
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def mistral3() -> transformers.Mistral3ForConditionalGeneration:
    """Draw a Mistral 3, its eyes for once closed."""
    tokenizer = qwen2_tokenizer()
    config = transformers.Mistral3Config(
        text_config={
            "model_type": "mistral", "vocab_size": len(tokenizer), "hidden_size": _WIDTH,
            "intermediate_size": 37, "num_hidden_layers": max(_LAYERS), "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 512,
            "sliding_window": None, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 37,
            "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|image_pad|>"), vision_feature_layer=-1,
    )  # fmt: skip
    return drawn(transformers.Mistral3ForConditionalGeneration(config))


def qwen3() -> transformers.Qwen3ForCausalLM:
    """Draw a Qwen 3 with a head that nobody asks."""
    tokenizer = qwen2_tokenizer()
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=_WIDTH, intermediate_size=37,
        num_hidden_layers=max(_LAYERS), num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return drawn(transformers.Qwen3ForCausalLM(config))


def _parts(text_encoder: torch.nn.Module, *, guidance_embeds: bool) -> dict[str, Any]:
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": batch_normed_vae(),
        "text_encoder": text_encoder,
        "tokenizer": qwen2_tokenizer(),
        "transformer": sharpened(
            drawn(
                diffusers.Flux2Transformer2DModel(
                    in_channels=16,  # 4 latent channels of 2x2 latent pixels
                    num_layers=2,
                    num_single_layers=2,
                    attention_head_dim=16,
                    num_attention_heads=2,
                    joint_attention_dim=len(_LAYERS) * _WIDTH,
                    axes_dims_rope=(4, 4, 4, 4),
                    guidance_embeds=guidance_embeds,
                ),
                last="proj_out",
                gain=0.3,
            )
        ),
    }


def flux2() -> diffusers.Flux2Pipeline:
    """FLUX.2 dev: guidance is embedded; its processor, of which only the text side is used, is
    a tokenizer here.
    """
    return diffusers.Flux2Pipeline(**_parts(mistral3(), guidance_embeds=True))


def klein_base() -> diffusers.Flux2KleinPipeline:
    """FLUX.2 Klein before distillation: guided away from the empty prompt, in calls of its own."""
    return diffusers.Flux2KleinPipeline(**_parts(qwen3(), guidance_embeds=False))


def klein() -> diffusers.Flux2KleinPipeline:
    """FLUX.2 Klein: one call a step."""
    return diffusers.Flux2KleinPipeline(**_parts(qwen3(), guidance_embeds=False), is_distilled=True)


def klein_kv() -> diffusers.Flux2KleinKVPipeline:
    """FLUX.2 Klein that reads its reference pictures once: keys and values are kept."""
    return diffusers.Flux2KleinKVPipeline(
        **_parts(qwen3(), guidance_embeds=False), is_distilled=True
    )


FAMILIES = {
    "kontext": kontext, "flux2": flux2, "flux2_klein_base": klein_base, "flux2_klein": klein,
    "flux2_klein_kv": klein_kv,
}  # fmt: skip

_FLUX2: dict[str, Any] = {
    "height": 64, "width": 64, "num_inference_steps": 3, "output_type": "pt",
    "max_sequence_length": 64, "text_encoder_out_layers": _LAYERS,
}  # fmt: skip
ARGUMENTS = {
    "kontext": {
        "height": 32, "width": 32, "max_area": 32 * 32, "_auto_resize": False,
        "num_inference_steps": 3, "output_type": "pt", "max_sequence_length": 48,
    },
    "flux2": _FLUX2, "flux2_klein_base": _FLUX2, "flux2_klein": _FLUX2, "flux2_klein_kv": _FLUX2,
}  # fmt: skip
