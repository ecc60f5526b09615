"""Encoders of text, and of pictures that are read like text."""

from carpool.engine.specs.rules import STACK, Pad, Spec

_TEXT = Spec(rows="input_ids", rules={"input_ids": STACK, "attention_mask": STACK})

_DECODER = Spec(  # language models read as encoders: later tokens do not show in earlier ones
    rows="input_ids",
    rules={
        "input_ids": Pad(
            mask="attention_mask", cut=("last_hidden_state", "hidden_states"), makes_mask=True
        ),
        "attention_mask": Pad(mask="attention_mask"),
    },
    adds={"use_cache": False},
)

SPECS: dict[tuple[str, str], Spec] = {
    ("CLIPTextModel", "forward"): _TEXT,
    ("CLIPTextModelWithProjection", "forward"): _TEXT,
    ("T5EncoderModel", "forward"): Spec(
        rows="input_ids",
        rules={
            "input_ids": Pad(mask="attention_mask", cut=("last_hidden_state", "hidden_states")),
            "attention_mask": Pad(mask="attention_mask"),
        },
    ),
    ("Gemma2Model", "forward"): _DECODER,  # SANA
    ("Mistral3Model", "forward"): _DECODER,  # ERNIE-Image: no mask, and never a picture
    ("Qwen3Model", "forward"): _DECODER,  # Z-Image
}
