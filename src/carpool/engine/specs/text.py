"""Encoders of text, and of images used as conditioning."""

from dataclasses import replace

from carpool.engine.specs.padding import Pad
from carpool.engine.specs.rules import CONCAT, STACK, Spec

_TEXT = Spec(rules={"input_ids": STACK, "attention_mask": STACK})

_T5 = Spec.of(
    input_ids=Pad(mask="attention_mask", cut=("last_hidden_state", "hidden_states")),
    attention_mask=Pad(mask="attention_mask"),
)

_DECODER = Spec(  # language models as encoders: causal, so end padding changes no earlier token
    rules={
        "input_ids": Pad(
            mask="attention_mask", cut=("last_hidden_state", "hidden_states"), makes_mask=True
        ),
        "attention_mask": Pad(mask="attention_mask"),
    },
    adds={"use_cache": False},
)

_UNREAD = {"use_cache": False, "logits_to_keep": 1}
# padded to a fixed length that the pipeline reads: never padded further
_FLUX2 = replace(_TEXT, adds=_UNREAD)

_GEMMA3 = replace(_DECODER, adds={"use_cache": False, "logits_to_keep": 1})

_LLAVA = replace(
    _GEMMA3,
    rules={
        **_GEMMA3.rules,
        "position_ids": Pad(mask="attention_mask"),
        "pixel_values": CONCAT,  # (pictures, 3, 336, 336)
    },
    unread=("image_hidden_states",),
)

_PICTURES = Spec(rules={"pixel_values": STACK})

SPECS: dict[tuple[str, str], Spec] = {
    ("CLIPTextModel", "forward"): _TEXT,
    ("CLIPTextModelWithProjection", "forward"): _TEXT,
    ("T5EncoderModel", "forward"): _T5,
    ("UMT5EncoderModel", "forward"): _T5,  # Wan, Helios
    ("CLIPVisionModel", "forward"): _PICTURES,
    ("CLIPVisionModelWithProjection", "forward"): _PICTURES,  # IP-adapters
    ("Gemma2Model", "forward"): _DECODER,  # SANA
    ("Gemma3ForConditionalGeneration", "forward"): _GEMMA3,  # LTX-2: never gets an image
    ("LlamaModel", "forward"): _DECODER,  # HunyuanVideo
    ("LlavaForConditionalGeneration", "forward"): _LLAVA,  # HunyuanVideo I2V
    ("Mistral3Model", "forward"): _DECODER,  # ERNIE-Image: no mask, never gets an image
    ("Qwen3Model", "forward"): _DECODER,  # Z-Image
    ("Mistral3ForConditionalGeneration", "forward"): _FLUX2,  # never gets an image
    ("Qwen2_5_VLForConditionalGeneration", "forward"): Spec(  # Qwen-Image
        rules={
            **_DECODER.rules,
            "pixel_values": CONCAT,  # (patches of all pictures of all rows, 1176)
            "image_grid_thw": CONCAT,  # (pictures of all rows, 3)
        },
        adds=_UNREAD,
    ),
    ("Qwen3ForCausalLM", "forward"): _FLUX2,  # Klein
    ("SingleImageEncoder", "forward"): Spec(rules={"image": STACK, "mask": STACK}),  # Hunyuan3D-2
}
