"""Requests of a family, and what plain diffusers gives on a pipeline however it is prepared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor, nn

from support.engine_driver import called
from support.matrix import CASES
from support.tiny import ARGUMENTS


def requests_of(family: str) -> list[dict[str, Any]]:
    case = next(c for c in CASES if c.family == family and c.task.startswith("text-to"))
    own = {n: v for n, v in ARGUMENTS[family].items() if n not in case.without}
    return [{**own, **case.common, **one} for one in case.requests]


def drawn(fields: Mapping[str, Any]) -> torch.Tensor:
    value: torch.Tensor = fields["images"] if "images" in fields else fields["frames"]
    return value.float()


def alone(pipe: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """What plain diffusers gives, called on the prepared pipeline outside of the engine."""
    pipe.set_progress_bar_config(disable=True)
    return drawn(called(pipe, **arguments))


def own_weights(module: nn.Module) -> dict[str, Tensor]:
    """Weights as files have them: each once, buffers of integers left out."""
    seen: set[int] = set()
    own = {}
    for name, weight in module.state_dict().items():
        if weight.is_floating_point() and weight.data_ptr() not in seen:
            seen.add(weight.data_ptr())
            own[name] = weight.contiguous().clone()
    return own


def gguf_of(weights: Mapping[str, Tensor], file: Path, plain: str = "F32") -> Path:
    """Weights as a GGUF file: 8-bit blocks where rows are long enough, else of a plain kind."""
    writer = GGUFWriter(file, "flux")
    for name, weight in weights.items():
        array = weight.float().numpy()
        is_matrix = array.ndim == 2 and array.shape[1] % 32 == 0
        kind = GGMLQuantizationType.Q8_0 if is_matrix else GGMLQuantizationType[plain]
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
