"""Detect modules whose quantization makes the rows of a batch affect each other."""

from typing import Any

import torch
from torch import Tensor, nn

LOUD = 1000.0  # factor of the loud row: outliers, and the largest value of an activation
TOKENS = 16  # tokens of a test row


def mixes_rows(module: nn.Module) -> str | None:
    """The reason why rows of a batch affect each other in a quantized module; None: they do not.

    A scale computed over a whole activation depends on all rows, and so does the choice of columns
    that LLM.int8 multiplies unquantized (Dettmers et al., 2022, section 3.2). One layer of each
    kind is tested: is a row's result the same next to a quiet row and to a loud one? Calls of a
    module with such a layer run alone.
    """
    tried: set[str] = set()
    for part in module.modules():
        weight: Any = part._parameters.get("weight")
        dynamic = getattr(weight, "act_quant_kwargs", None)
        if "PerTensor" in repr(getattr(dynamic, "granularity", None)):
            return "its quantization takes one scale of all rows of a batch"
        kind = f"{type(part)} {type(weight)} {dynamic}"
        if not _is_quantized(part) or kind in tried:
            continue
        tried.add(kind)
        if _is_changed_by_others(part, module):
            return f"a row of its {type(part).__name__} depends on the other rows of a batch"
    return None


def _is_quantized(part: nn.Module) -> bool:
    """Whether a linear layer is not torch's own, or its weights are not plain."""
    if not hasattr(part, "in_features") or not hasattr(part, "weight"):
        return False
    weight = part._parameters.get("weight")
    if type(part) is not nn.Linear or type(weight) is not nn.Parameter:
        return True
    return type(weight.data) is not Tensor


@torch.no_grad()
def _is_changed_by_others(layer: nn.Module, module: nn.Module) -> bool:
    """Whether a layer changes a row's result next to a loud row; False if it cannot run."""
    weight: Any = layer.weight
    plain = (weight.dtype for weight in module.parameters() if type(weight) is nn.Parameter)
    dtype = next((dtype for dtype in plain if dtype.is_floating_point), torch.float32)
    dice = torch.Generator().manual_seed(0)
    shape = 2, TOKENS, int(layer.in_features)  # type: ignore[arg-type]
    rows = torch.rand(shape, generator=dice).to(weight.device, dtype) - 0.5
    loud = torch.stack([rows[0], LOUD * rows[1]])
    try:
        quiet, again, beside = (layer(batch)[0] for batch in (rows, rows, loud))
    except Exception:  # a kernel may raise anything; requests will fail with it
        return False
    noise = (again - quiet).abs().max()  # zero, except for kernels with unordered sums
    return bool((beside - quiet).abs().max() > 2 * noise)  # NaN for streamed weights: unknown
