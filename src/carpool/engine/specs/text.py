"""Encoders of text, and of pictures that are read like text."""

from carpool.engine.specs.rules import STACK, Pad, Spec

_TEXT = Spec(rows="input_ids", rules={"input_ids": STACK, "attention_mask": STACK})

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
}
