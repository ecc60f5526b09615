"""Modules whose quantization lets the rows of a batch change each other: their calls run alone."""

from typing import Any

from torch import nn


def mixes_rows(module: nn.Module) -> str | None:
    """Why the rows of a batch change each other in a module, if its quantization has it so.

    A scale that is taken of a whole activation depends on all rows, and so does the choice of the
    columns that LLM.int8 multiplies unquantized (Dettmers et al., 2022, section 3.2). The calls of
    such a module run alone.
    """
    for part in module.modules():
        state: Any = getattr(part, "state", None)
        if type(part).__name__ == "Linear8bitLt" and state.threshold > 0:
            return "LLM.int8 chooses by all rows of a batch what it multiplies unquantized"
        weight = part._parameters.get("weight")
        dynamic = getattr(weight, "act_quant_kwargs", None)
        if "PerTensor" in repr(getattr(dynamic, "granularity", None)):
            return "its quantization takes one scale of all rows of a batch"
    return None
