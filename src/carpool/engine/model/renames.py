"""Converters of original names for parts of LTX-2 that diffusers cannot read from single files.

A file of LTX-2 has its connectors under the prefix of its denoiser, where diffusers' own converter
drops them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

CONNECTORS = re.compile(
    r"((model\.)?diffusion_model\.)?((video|audio)_embeddings_connector|text_embedding_projection)\."
)
"""Prefixes of connectors' names in original code."""
_NAMES = {
    "LTX2TextConnectors": {
        r"^(model\.)?diffusion_model\.": "",
        r"^(video|audio)_embeddings_connector\.": r"\1_connector.",
        r"^text_embedding_projection\.aggregate_embed\.": "text_proj_in.",
        r"\btransformer_1d_blocks\.": "transformer_blocks.",
        r"\b([qk])_norm\.": r"norm_\1.",
    },
    "LTX2Vocoder": {
        r"^conv_pre\.": "conv_in.",
        r"^conv_post\.": "conv_out.",
        r"^ups\.": "upsamplers.",
        r"^resblocks\.": "resnets.",
    },
}
"""Patterns of original names and their replacements in diffusers, by class."""


def renaming_of(cls: type) -> Callable[..., Mapping[str, Tensor]] | None:
    """A converter of original names with diffusers' interface; None: none for this class."""
    patterns = _NAMES.get(cls.__name__)
    if patterns is None:
        return None

    def convert(checkpoint: Mapping[str, Tensor], **_: Any) -> dict[str, Tensor]:
        renamed = {}
        for name, weight in checkpoint.items():
            for pattern, new in patterns.items():
                name = re.sub(pattern, new, name)
            renamed[name] = weight
        return renamed

    return convert
