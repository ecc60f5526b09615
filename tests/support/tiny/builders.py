"""Parts that need more than a class and a config: `part` calls these by name."""

import json
from typing import Any

import transformers
from tokenizers.pre_tokenizers import ByteLevel

from support.tiny.parts import (  # noqa: F401 (tokenizers by name)
    clip_tokenizer,
    drawn,
    gemma_tokenizer,
    llama_tokenizer,
    qwen2_tokenizer,
    t5_tokenizer,
)

_GLM_PICTURE_TOKENS = 128  # the first of the vocabulary, and all that is ever generated
_GLM_TOKENS = ["<|endoftext|>", "<|image|>", "<sop>", "<eop>", "<|dit_token|>"]
_GLM_TEMPLATE = """\
{% for message in messages %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<|image|>{% endif %}\
{% endfor %}{% endfor %}"""
_GEMMA_TEMPLATE = """{% set content = messages[-1].content %}{% if content is string %}\
{{ content[-32:] }}{% else %}<boi>{{ content[-1].text[-32:] }}{% endif %} Output:"""


def _token_ids(*names: str) -> dict[str, int]:
    """The config of a Qwen: `image_token_id` is the place of `<|image_pad|>`."""
    tokenizer = qwen2_tokenizer()
    return {
        f"{name.removesuffix('_pad')}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in names
    }


def qwen_vl() -> Any:
    """Draw a Qwen 2.5 VL that sees 56x56 px as 4 tokens; what it writes is a few tokens long."""
    tokenizer, width = qwen2_tokenizer(), 32
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 37,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3],
            },
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 37, "num_heads": 2,
            "out_hidden_size": width, "fullatt_block_indexes": [1],
        },
        **_token_ids("image_pad", "video_pad", "vision_pad", "vision_start", "vision_end"),
    )  # fmt: skip
    model = drawn(transformers.Qwen2_5_VLForConditionalGeneration(config))
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


def qwen3_vl(name: str, layers: int, width: int = 16, **more: Any) -> Any:
    """Draw a Qwen 3 VL, or one of its kin."""
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 16}
    rope = {
        "rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1],
        "partial_rotary_factor": more.pop("partial_rotary_factor", 1.0),
    }  # fmt: skip
    text = {
        **sizes, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 8, "rope_parameters": rope, **more, "vocab_size": len(qwen2_tokenizer()),
    }  # fmt: skip
    vision: dict[str, Any] = {**sizes, "depth": 2, "num_heads": 2, "out_hidden_size": width}
    vision["deepstack_visual_indexes"], cls = [0], getattr(transformers, name)
    tokens = _token_ids("image_pad", "video_pad", "vision_start", "vision_end")
    return drawn(cls(cls.config_class(text_config=text, vision_config=vision, **tokens)))


def qwen3_processor() -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    pixels = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56, patch_size=16)
    tokenizer, video = qwen2_tokenizer(), Qwen3VLVideoProcessor()
    return Qwen3VLProcessor(pixels, tokenizer, video, chat_template=tokenizer.chat_template)


def clip_processor() -> Any:
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    return transformers.CLIPProcessor(pixels, clip_tokenizer())


def gemma_processor() -> Any:
    """A processor for `gemma3`, which reads the ends of texts only."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer, names = gemma_tokenizer(), ("boi", "eoi", "image")
    first = len(tokenizer)
    tokenizer.add_tokens([f"<{name}>" for name in names], special_tokens=True)
    for number, name in enumerate(names):
        setattr(tokenizer, f"{name}_token", f"<{name}>")
        setattr(tokenizer, f"{name}_token_id", first + number)
    tokenizer.chat_template = _GEMMA_TEMPLATE
    pixels = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return transformers.Gemma3Processor(pixels, tokenizer, image_seq_length=4)


def glm_tokenizer() -> Any:
    """Build the tokenizer of the planner: picture tokens, then those of `qwen2_tokenizer`."""
    model = json.loads(qwen2_tokenizer().backend_tokenizer.to_str())["model"]
    text = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = [*(f"<picture_{i}>" for i in range(_GLM_PICTURE_TOKENS)), *text, *_GLM_TOKENS]
    return transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(dict.fromkeys(tokens))},
        merges=[tuple(merge) for merge in model["merges"]], bos_token="<|dit_token|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>",
        },
        chat_template=_GLM_TEMPLATE, padding_side="left", model_max_length=1024,
    )  # fmt: skip


def glm_processor() -> Any:
    from transformers import GlmImageImageProcessor, GlmImageProcessor  # need torchvision

    images = GlmImageImageProcessor(
        size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
        patch_size=16,
        merge_size=1,
        temporal_patch_size=1,
    )
    return GlmImageProcessor(images, glm_tokenizer(), chat_template=_GLM_TEMPLATE)


def glm_planner() -> Any:
    """Draw the model that writes plans; what would end one early is never generated."""
    tokens = glm_tokenizer()
    end = tokens.pad_token_id
    config = transformers.GlmImageConfig(
        text_config={
            "vocab_size": len(tokens), "vision_vocab_size": _GLM_PICTURE_TOKENS, "hidden_size": 32,
            "intermediate_size": 37,
            "num_hidden_layers": 1,  # a plan takes 261 tokens, however small the picture
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024,
            "pad_token_id": end, "eos_token_id": end,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
            },
        },
        vision_config={
            "depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 64, "patch_size": 16,
            "intermediate_size": 37,
        },
        vq_config={"embed_dim": 32, "num_embeddings": _GLM_PICTURE_TOKENS, "latent_channels": 32},
        image_token_id=tokens.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=_GLM_PICTURE_TOKENS - 2, image_end_token_id=_GLM_PICTURE_TOKENS - 1,
    )  # fmt: skip
    model = drawn(transformers.GlmImageForConditionalGeneration(config))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = end
    return model


def roberta_tokenizer() -> Any:
    """Build a tokenizer whose words are bytes."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    return transformers.RobertaTokenizer(vocab=vocab, merges=[], model_max_length=77)
