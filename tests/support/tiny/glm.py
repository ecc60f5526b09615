"""GLM-Image: a language model writes a plan in picture tokens, and a transformer draws it."""

import json

import diffusers
import transformers

from support.tiny.parts import drawn, qwen2_tokenizer, t5

_WIDTH = 32  # of the text's embeddings
_PICTURE_TOKENS = 128  # the first of the vocabulary, and all that is ever generated
_TOKENS = ["<|endoftext|>", "<|image|>", "<sop>", "<eop>", "<|dit_token|>"]
_TEMPLATE = """\
{% for message in messages %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<|image|>{% endif %}\
{% endfor %}{% endfor %}"""


def tokenizer() -> transformers.Qwen2Tokenizer:
    """Build the tokenizer of the planner: picture tokens, then those of `qwen2_tokenizer`."""
    model = json.loads(qwen2_tokenizer().backend_tokenizer.to_str())["model"]
    text = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = [*(f"<picture_{i}>" for i in range(_PICTURE_TOKENS)), *text, *_TOKENS]
    return transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(dict.fromkeys(tokens))},
        merges=[tuple(merge) for merge in model["merges"]], bos_token="<|dit_token|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>",
        },
        chat_template=_TEMPLATE, padding_side="left", model_max_length=1024,
    )  # fmt: skip


def planner(tokens: transformers.Qwen2Tokenizer) -> transformers.GlmImageForConditionalGeneration:
    """Draw the model that writes plans; what would end one early is never generated."""
    end = tokens.pad_token_id
    config = transformers.GlmImageConfig(
        text_config={
            "vocab_size": len(tokens),
            "vision_vocab_size": _PICTURE_TOKENS,
            "hidden_size": 32,
            "intermediate_size": 37,
            "num_hidden_layers": 1,  # a plan takes 261 tokens, however small the picture
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "pad_token_id": end,
            "eos_token_id": end,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "image_size": 64,
            "patch_size": 16,
            "intermediate_size": 37,
        },
        vq_config={"embed_dim": 32, "num_embeddings": _PICTURE_TOKENS, "latent_channels": 32},
        image_token_id=tokens.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=_PICTURE_TOKENS - 2,
        image_end_token_id=_PICTURE_TOKENS - 1,
    )
    model = drawn(transformers.GlmImageForConditionalGeneration(config))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = end
    return model


def glm() -> diffusers.GlmImagePipeline:
    """GLM-Image: only what a prompt quotes reaches the transformer as text, unpadded."""
    from transformers import GlmImageImageProcessor, GlmImageProcessor  # need torchvision

    tokens = tokenizer()
    images = GlmImageImageProcessor(
        size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
        patch_size=16,
        merge_size=1,
        temporal_patch_size=1,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, latent_channels=4,
        norm_num_groups=4, latents_mean=[0.1, -0.1, 0.2, 0.0], latents_std=[1.0, 0.9, 1.1, 1.2],
    )  # fmt: skip
    return diffusers.GlmImagePipeline(
        tokenizer=transformers.ByT5Tokenizer(),
        processor=GlmImageProcessor(images, tokens, chat_template=_TEMPLATE),
        text_encoder=t5(_WIDTH, vocab_size=len(transformers.ByT5Tokenizer())),
        vision_language_encoder=planner(tokens), vae=drawn(vae, last="decoder.conv_out", gain=0.5),
        transformer=drawn(
            diffusers.GlmImageTransformer2DModel(
                in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
                num_attention_heads=2, text_embed_dim=_WIDTH, time_embed_dim=32, condition_dim=8,
                prior_vq_quantizer_codebook_size=_PICTURE_TOKENS,
            ),
            last="proj_out", gain=0.3,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75,
        ),
    )  # fmt: skip


FAMILIES = {"glm": glm}
ARGUMENTS = {
    "glm": {
        "height": 64, "width": 64, "num_inference_steps": 3, "max_sequence_length": 64,
        "output_type": "pt",
    },
}  # fmt: skip
