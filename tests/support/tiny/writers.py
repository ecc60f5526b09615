"""Plain language models, in folders as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from support.tiny.parts import part, qwen2_tokenizer

_TEMPLATE = """\
{% for message in messages %}{{ message.role }}: \
{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<|image_pad|>{% endif %}\
{% endfor %}
{% endfor %}assistant:"""


def writer() -> Any:
    """Draw a Qwen 3 that writes until it is stopped."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return part("writer")


def save_writer(folder: Path) -> Path:
    """Save a language model that reads texts."""
    writer().save_pretrained(folder)
    qwen2_tokenizer().save_pretrained(folder)
    return folder


def save_seer(folder: Path) -> Path:
    """Save a Llava, which reads texts and sees 28x28 px as 4 tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        part("seer").save_pretrained(folder)
    sides = {"height": 28, "width": 28}
    processor = transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=sides, crop_size=sides),
        tokenizer=qwen2_tokenizer(), patch_size=14, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", chat_template=_TEMPLATE,
        image_token="<|image_pad|>",
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder
