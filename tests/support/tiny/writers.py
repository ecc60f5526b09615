"""Plain language models, in folders as transformers saves them."""

from pathlib import Path

import torch
import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from support.tiny.parts import drawn, qwen2_tokenizer

_TEMPLATE = """\
{% for message in messages %}{{ message.role }}: \
{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<|image_pad|>{% endif %}\
{% endfor %}
{% endfor %}assistant:"""


def qwen3() -> transformers.Qwen3ForCausalLM:
    """Draw a Qwen 3 that writes until it is stopped."""
    tokenizer = qwen2_tokenizer()
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = drawn(transformers.Qwen3ForCausalLM(config))
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)  # so that what was read decides what is written
    return model


def save_writer(folder: Path) -> Path:
    """Save a language model that reads texts."""
    qwen3().save_pretrained(folder)
    qwen2_tokenizer().save_pretrained(folder)
    return folder


def seer() -> transformers.LlavaForConditionalGeneration:
    """Draw a Llava, which sees 28x28 px as 4 tokens."""
    tokenizer = qwen2_tokenizer()
    config = transformers.LlavaConfig(
        text_config={
            "model_type": "qwen3", "vocab_size": len(tokenizer), "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
            "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 37,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|image_pad|>"), image_seq_length=4,
        vision_feature_layer=-1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = drawn(transformers.LlavaForConditionalGeneration(config))
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)
    return model


def save_seer(folder: Path) -> Path:
    """Save a language model that reads texts and pictures."""
    seer().save_pretrained(folder)
    sides = {"height": 28, "width": 28}
    processor = transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=sides, crop_size=sides),
        tokenizer=qwen2_tokenizer(), patch_size=14, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", chat_template=_TEMPLATE,
        image_token="<|image_pad|>",
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder
