"""Qwen-Image, and its kin that edit pictures or take them apart."""

from typing import Any

import diffusers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from support.tiny.parts import drawn, qwen2_tokenizer, sharpened

_WIDTH = 32  # of the text's embeddings


def qwen_vl() -> Qwen2_5_VLForConditionalGeneration:
    """Draw a Qwen 2.5 VL that sees 56x56 px as 4 tokens; what it writes is a few tokens long."""
    tokenizer = qwen2_tokenizer()
    named = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in {
            "image": "image_pad", "video": "video_pad", "vision": "vision_pad",
            "vision_start": "vision_start", "vision_end": "vision_end",
        }.items()
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": _WIDTH, "intermediate_size": 37,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3],
            },
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 37, "num_heads": 2,
            "out_hidden_size": _WIDTH, "fullatt_block_indexes": [1],
        },
        **named,
    )  # fmt: skip
    model = drawn(Qwen2_5_VLForConditionalGeneration(config))
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 4))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def qwen_processor() -> Any:
    """Make the processor of Qwen 2.5 VL, for which torchvision has to be there."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    tokenizer = qwen2_tokenizer()
    pixels = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=tokenizer.chat_template,
    )


def causal_vae(channels: int, **config: Any) -> diffusers.AutoencoderKLQwenImage:
    """Draw a video VAE that is shown one frame: factor 4.

    Args:
        channels: of the latents; pictures with as many are taken for latents.
        config: of the VAE.
    """
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=4, z_dim=channels, dim_mult=[1, 2, 2], num_res_blocks=1,
        temperal_downsample=[False, True], latents_mean=[0.2, -0.3] * (channels // 2),
        latents_std=[1.5, 0.8] * (channels // 2), **config,
    )  # fmt: skip
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def _parts(channels: int = 4, vae: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=4 * channels,  # of 2x2 latent pixels
        out_channels=channels,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_WIDTH,
        axes_dims_rope=(8, 4, 4),
        **config,
    )
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": causal_vae(channels, **(vae or {})),
        "text_encoder": qwen_vl(),
        "tokenizer": qwen2_tokenizer(),
        "transformer": sharpened(drawn(transformer, last="proj_out", gain=0.3)),
    }


def qwen_image() -> diffusers.QwenImagePipeline:
    """Qwen-Image: text of any length, masked only where prompts differ in it."""
    return diffusers.QwenImagePipeline(**_parts())


def qwen_edit() -> diffusers.QwenImageEditPipeline:
    """Qwen-Image-Edit: one picture, read by the text encoder and by the VAE."""
    return diffusers.QwenImageEditPipeline(**_parts(), processor=qwen_processor())


def qwen_edit_plus() -> diffusers.QwenImageEditPlusPipeline:
    """Qwen-Image-Edit 2511: up to three pictures, which stay at time zero."""
    return diffusers.QwenImageEditPlusPipeline(
        **_parts(zero_cond_t=True), processor=qwen_processor()
    )


def qwen_layered() -> diffusers.QwenImageLayeredPipeline:
    """Qwen-Image-Layered: takes an RGBA picture apart into a few."""
    parts = _parts(8, {"input_channels": 4}, use_additional_t_cond=True, use_layer3d_rope=True)
    return diffusers.QwenImageLayeredPipeline(**parts, processor=qwen_processor())


def qwen_21(processor: Any = None) -> diffusers.QwenImage21Pipeline:
    """Qwen-Image-2.1: keys and values of a prompt and its pictures are computed once."""
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=64, out_channels=64, num_layers=2, attention_head_dim=32,
        num_attention_heads=2, context_in_dim=_WIDTH, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=8, decoder_base_dim=8, z_dim=64, dim_mult=[1] * 5, num_res_blocks=1
    )
    return diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=drawn(vae),
        text_encoder=qwen_vl(),
        processor=processor or qwen_processor(),
        transformer=sharpened(drawn(transformer, last="proj_out", gain=0.3)),
    )


FAMILIES = {
    "qwen_21": qwen_21, "qwen_image": qwen_image, "qwen_edit": qwen_edit,
    "qwen_edit_plus": qwen_edit_plus, "qwen_layered": qwen_layered,
}  # fmt: skip

_IMAGE: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "pt"}
ARGUMENTS = {
    "qwen_21": _IMAGE, "qwen_image": _IMAGE, "qwen_edit": _IMAGE, "qwen_edit_plus": _IMAGE,
    "qwen_layered": {"num_inference_steps": 3, "layers": 2, "output_type": "pt"},
}  # fmt: skip
