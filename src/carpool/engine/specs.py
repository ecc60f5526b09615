"""How the arguments of each model class fuse: data, a small table a class.

A class without a table never fuses: its calls run alone, correctly. To add one, say for every
tensor argument of the method what its first axis means. Arguments that the table does not name
must be plain Python values, equal in all calls of a forward (flags); a call that passes a tensor
or an object under a name the table does not know runs alone.

| rule | meaning | fused |
| --- | --- | --- |
| STACK | axis 0 is one entry a row | concatenated |
| SHARE | no row axis: one value for the whole forward | must be equal in content; one is passed |
| LIST | a Python list, one entry a row | joined |
| SCALAR | one number for all rows of a call | expanded to one a row |
| UNUSED | taken for the sake of other classes, and not read | that of the first call is passed |
| Pad | like STACK, but one axis may differ in length; exact when the mask is honoured | padded |
| a dict | a dict argument, with a rule for each of its entries | entry by entry |

Sources: the `forward` methods of diffusers 0.42 and transformers 5, and what their pipelines pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    STACK = "stack"
    SHARE = "share"
    LIST = "list"
    SCALAR = "scalar"
    UNUSED = "unused"


STACK, SHARE, LIST, SCALAR, UNUSED = Kind


@dataclass(frozen=True, slots=True)
class Pad:
    """Stack, with zeros after the shorter ones along `axis`, where calls bring a mask.

    The mask, (rows, length) with zeros for what is to be ignored, has this rule too. Calls that
    bring no mask only fuse with calls of their own length.
    """

    mask: str  # name of the mask argument
    axis: int = 1
    cut: tuple[str, ...] = ()  # fields of the output that carry the axis (as axis 1): cut back


Rule = Kind | Pad | Mapping[str, "Rule"]


@dataclass(frozen=True, slots=True)
class Spec:
    """How calls of one method fuse."""

    rows: str  # the argument whose axis 0 (or length) counts the rows of a call
    rules: Mapping[str, Rule]
    returns_list: bool = False  # lists in the output hold one entry a row, not one a layer
    casts: bool = False  # float inputs are cast to the module's own dtype first


_TEXT = Spec(rows="input_ids", rules={"input_ids": STACK, "attention_mask": STACK})

SPECS: dict[tuple[str, str], Spec] = {
    ("FluxTransformer2DModel", "forward"): Spec(
        rows="hidden_states",
        rules={
            "hidden_states": STACK,  # (rows, image tokens, 64)
            "timestep": STACK,  # (rows,), 0-1
            "guidance": STACK,  # (rows,), or None for models without guidance embedding
            "pooled_projections": STACK,  # (rows, 768)
            "encoder_hidden_states": STACK,  # (rows, text tokens, 4096): no mask, never padded
            "txt_ids": SHARE,  # (text tokens, 3)
            "img_ids": SHARE,  # (image tokens, 3): equal token counts may differ in geometry
        },
    ),
    ("SD3Transformer2DModel", "forward"): Spec(
        rows="hidden_states",
        rules={
            "hidden_states": STACK,  # (rows, 16, H / 8, W / 8)
            "timestep": STACK,  # (rows,), 0-1000
            "encoder_hidden_states": STACK,  # (rows, 77 + text tokens, 4096)
            "pooled_projections": STACK,  # (rows, 2048)
        },
    ),
    ("UNet2DConditionModel", "forward"): Spec(
        rows="sample",
        rules={
            "sample": STACK,  # (rows, 4, H / 8, W / 8)
            "timestep": SCALAR,  # 0-d, or a number
            "encoder_hidden_states": STACK,  # (rows, 77, 768 or 2048)
            "timestep_cond": STACK,  # (rows, D) or None
            "added_cond_kwargs": {"text_embeds": STACK, "time_ids": STACK},  # SDXL; else None
        },
    ),
    ("CLIPTextModel", "forward"): _TEXT,
    ("CLIPTextModelWithProjection", "forward"): _TEXT,
    ("T5EncoderModel", "forward"): Spec(
        rows="input_ids",
        rules={
            "input_ids": Pad(mask="attention_mask", cut=("last_hidden_state", "hidden_states")),
            "attention_mask": Pad(mask="attention_mask"),
        },
    ),
    # half-precision pipelines with a float32 VAE (see pipeline.py) rely on the cast
    ("AutoencoderKL", "encode"): Spec(rows="x", rules={"x": STACK}, casts=True),
    ("AutoencoderKL", "decode"): Spec(
        rows="z",
        rules={"z": STACK, "generator": UNUSED},  # Stable Diffusion 1.5 passes one
        casts=True,
    ),
}
