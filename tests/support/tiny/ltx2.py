"""LTX-2: video and sound at once, by text or from a first picture."""

from typing import Any

import diffusers
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from support.tiny.parts import drawn, gemma_tokenizer

_WIDTH = 16  # of the text's embeddings
_LAYERS = 2  # of the text encoder
_REGISTERS = 8
_CHANNELS = 4  # of the latents, of video and of sound
_TEMPLATE = """{% set content = messages[-1].content %}{% if content is string %}\
{{ content[-32:] }}{% else %}<boi>{{ content[-1].text[-32:] }}{% endif %} Output:"""


def gemma3(width: int = _WIDTH) -> Gemma3ForConditionalGeneration:
    """Draw a Gemma 3 that could see pictures, and is read as a text encoder."""
    tokenizer = gemma_tokenizer()
    size = len(tokenizer)
    config = Gemma3Config(
        text_config={
            "vocab_size": size + 3, "hidden_size": width, "intermediate_size": 37,
            "num_hidden_layers": _LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": width, "intermediate_size": 37, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        mm_tokens_per_image=4, boi_token_index=size, eoi_token_index=size + 1,
        image_token_index=size + 2,
    )  # fmt: skip
    return drawn(Gemma3ForConditionalGeneration(config))


def processor() -> Gemma3Processor:
    """A processor for `gemma3`, which reads the ends of texts only."""
    tokenizer, names = gemma_tokenizer(), ("boi", "eoi", "image")
    first = len(tokenizer)
    tokenizer.add_tokens([f"<{name}>" for name in names], special_tokens=True)
    for number, name in enumerate(names):
        setattr(tokenizer, f"{name}_token", f"<{name}>")
        setattr(tokenizer, f"{name}_token_id", first + number)
    tokenizer.chat_template = _TEMPLATE
    sides = {"height": 28, "width": 28}
    return Gemma3Processor(Gemma3ImageProcessorPil(size=sides), tokenizer, image_seq_length=4)


def _connectors() -> LTX2TextConnectors:
    connectors = LTX2TextConnectors(
        caption_channels=_WIDTH, text_proj_in_factor=_LAYERS + 1,
        video_connector_num_attention_heads=2, video_connector_attention_head_dim=8,
        video_connector_num_layers=1, video_connector_num_learnable_registers=_REGISTERS,
        audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1, audio_connector_num_learnable_registers=_REGISTERS,
        connector_rope_base_seq_len=32, rope_double_precision=False, rope_type="split",
    )  # fmt: skip
    return drawn(connectors)


def _vae() -> diffusers.AutoencoderKLLTX2Video:
    """Draw a VAE that shrinks each side by 8 and time by 2."""
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=_CHANNELS, block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",), decoder_block_out_channels=(8,),
        layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",), upsample_type=("spatiotemporal",),
        upsample_residual=(False,), upsample_factor=(1,), decoder_causal=False,
    )  # fmt: skip
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, _CHANNELS))
    vae.latents_std.copy_(torch.linspace(0.8, 1.2, _CHANNELS))
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def _audio_vae() -> diffusers.AutoencoderKLLTX2Audio:
    """Draw a VAE of spectrograms, 8 frequencies in 2."""
    vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=_CHANNELS, ch_mult=(1,), num_res_blocks=1, resolution=32,
        latent_channels=_CHANNELS // 2, mel_bins=8,
    )  # fmt: skip
    return drawn(vae)


def _vocoder() -> LTX2Vocoder:
    vocoder = LTX2Vocoder(
        in_channels=16,  # 8 frequencies, left and right
        hidden_channels=32,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
    drawn(vocoder)
    with torch.no_grad():
        for part in vocoder.upsamplers:
            part.weight.normal_(std=(2 * part.in_channels) ** -0.5)  # two taps reach each sample
    return vocoder


def _transformer() -> diffusers.LTX2VideoTransformer3DModel:
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=_CHANNELS, out_channels=_CHANNELS, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, audio_in_channels=_CHANNELS, audio_out_channels=_CHANNELS,
        audio_num_attention_heads=2, audio_attention_head_dim=4, audio_cross_attention_dim=8,
        num_layers=2, caption_channels=_WIDTH, rope_double_precision=False, rope_type="split",
        perturbed_attn=True,
    )  # fmt: skip
    drawn(transformer, last="audio_proj_out", gain=0.3)
    with torch.no_grad():
        for parameter in transformer.proj_out.parameters():
            parameter.mul_(0.3)
    return transformer


def ltx2() -> diffusers.LTX2Pipeline:
    """LTX-2: text padded on the left, three calls a step, of two rows, one and one."""
    return diffusers.LTX2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=_vae(),
        audio_vae=_audio_vae(), text_encoder=gemma3(), tokenizer=gemma_tokenizer(),
        connectors=_connectors(), transformer=_transformer(), vocoder=_vocoder(),
    )  # fmt: skip


FAMILIES = {"ltx2": ltx2}

ARGUMENTS: dict[str, dict[str, Any]] = {
    "ltx2": {
        "height": 32, "width": 64, "num_frames": 5, "frame_rate": 25.0, "num_inference_steps": 3,
        "max_sequence_length": 4 * _REGISTERS, "spatio_temporal_guidance_blocks": [1],
        "output_type": "pt",
    },
}  # fmt: skip
