"""HunyuanVideo: text-to-video, and image-to-video of both kinds."""

from typing import Any, Literal

import diffusers
import transformers

from support.tiny.parts import CLIP_WIDTH, clip, clip_tokenizer, drawn, llama_tokenizer

_TEXT_WIDTH = 16
_CHANNELS = 4  # of the latents
_IMAGE_SIZE, _PATCH_SIZE = 64, 16
_IMAGE_TOKENS = (_IMAGE_SIZE // _PATCH_SIZE) ** 2


def _llama_config() -> transformers.LlamaConfig:
    tokenizer = llama_tokenizer()
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=_TEXT_WIDTH, intermediate_size=37,
        num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def llama() -> transformers.LlamaModel:
    """Draw a Llama that is read as a text encoder."""
    return drawn(transformers.LlamaModel(_llama_config()))


def llava() -> transformers.LlavaForConditionalGeneration:
    """Draw a Llama that sees pictures, 16 tokens each."""
    tokenizer = llama_tokenizer()
    config = transformers.LlavaConfig(
        text_config=_llama_config(),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=_TEXT_WIDTH, intermediate_size=37, num_hidden_layers=2,
            num_attention_heads=4, image_size=_IMAGE_SIZE, patch_size=_PATCH_SIZE,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=_IMAGE_TOKENS, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return drawn(transformers.LlavaForConditionalGeneration(config))


def _vae() -> diffusers.AutoencoderKLHunyuanVideo:
    """Draw a causal VAE that shrinks each side by 8 and time by 4."""
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=_CHANNELS,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
    )
    return drawn(vae, last="decoder.conv_out", gain=0.5)


def _transformer(
    in_channels: int = _CHANNELS,
    *,
    guidance_embeds: bool = True,
    image_condition_type: Literal["latent_concat", "token_replace"] | None = None,
) -> diffusers.HunyuanVideoTransformer3DModel:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=in_channels, out_channels=_CHANNELS, num_attention_heads=2,
        attention_head_dim=10, num_layers=2, num_single_layers=2, num_refiner_layers=1,
        patch_size=1, guidance_embeds=guidance_embeds, text_embed_dim=_TEXT_WIDTH,
        pooled_projection_dim=CLIP_WIDTH, rope_axes_dim=(2, 4, 4),
        image_condition_type=image_condition_type,
    )  # fmt: skip
    return drawn(transformer, last="proj_out", gain=0.3)


def _parts() -> dict[str, Any]:
    return {
        "tokenizer": llama_tokenizer(), "tokenizer_2": clip_tokenizer(), "text_encoder_2": clip(),
        "vae": _vae(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }  # fmt: skip


def _image_to_video(
    transformer: diffusers.HunyuanVideoTransformer3DModel,
) -> diffusers.HunyuanVideoImageToVideoPipeline:
    return diffusers.HunyuanVideoImageToVideoPipeline(
        **_parts(),
        text_encoder=llava(),
        transformer=transformer,
        image_processor=transformers.CLIPImageProcessor(crop_size=_IMAGE_SIZE, size=_IMAGE_SIZE),
    )


def hunyuan_t2v() -> diffusers.HunyuanVideoPipeline:
    """HunyuanVideo: embedded guidance, masked text."""
    return diffusers.HunyuanVideoPipeline(
        **_parts(), text_encoder=llama(), transformer=_transformer()
    )


def hunyuan_i2v() -> diffusers.HunyuanVideoImageToVideoPipeline:
    """HunyuanVideo I2V with 16 channels: the picture is the first latent frame."""
    return _image_to_video(_transformer(image_condition_type="token_replace"))


def hunyuan_i2v_33ch() -> diffusers.HunyuanVideoImageToVideoPipeline:
    """HunyuanVideo I2V with 33 channels: the picture and a mask are extra channels."""
    return _image_to_video(
        _transformer(2 * _CHANNELS + 1, guidance_embeds=False, image_condition_type="latent_concat")
    )


FAMILIES = {
    "hunyuan_t2v": hunyuan_t2v,
    "hunyuan_i2v": hunyuan_i2v,
    "hunyuan_i2v_33ch": hunyuan_i2v_33ch,
}

_VIDEO: dict[str, Any] = {
    "height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 3, "max_sequence_length": 32,
    "output_type": "pt",
}  # fmt: skip
_USER = "<|start_header_id|>user<|end_header_id|>{}<|eot_id|>"
_ANSWER = "<|start_header_id|>assistant<|end_header_id|>"
_SEEN = {
    "template": f"<|start_header_id|>system<|end_header_id|><image><|eot_id|>{_USER}{_ANSWER}",
    "crop_start": 8,  # tokens before the prompt, the picture being one
    "image_emb_start": 3,
    "image_emb_end": 3 + _IMAGE_TOKENS,
    "image_emb_len": _IMAGE_TOKENS,
}
ARGUMENTS = {  # the default templates have a hundred tokens and expect 576 of a picture
    "hunyuan_t2v": {**_VIDEO, "prompt_template": {"template": _USER, "crop_start": 3}},
    "hunyuan_i2v": {**_VIDEO, "prompt_template": _SEEN},
    "hunyuan_i2v_33ch": {**_VIDEO, "num_frames": 9, "prompt_template": _SEEN},  # 4 are cut
}
