"""A fingerprint of how a model was prepared: what changes the seconds of its forwards.

Number types, quantization, compiled parts, hooks (offloading, streaming, float8 storage), attention
back ends, tiles, the configuration of each module. Costs learned of a model that was prepared
otherwise are no prior.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from carpool.engine.intercept import is_compiled
from carpool.engine.model.load import LoadedPipeline


def fingerprint(loaded: LoadedPipeline) -> dict[str, Any]:
    """By component, and of the process as "numbers". JSON; short."""
    identity: dict[str, Any] = {n: _module(module) for n, module in sorted(loaded.modules.items())}
    identity["numbers"] = torch.get_float32_matmul_precision()
    return identity


def _module(module: nn.Module) -> dict[str, Any]:
    weights = [*module.parameters(), *module.buffers()]
    parts = list(module.modules())
    places = Counter(f"{weight.dtype} {weight.device} {_class_name(weight)}" for weight in weights)
    return {
        "class": type(module).__name__,
        "config": _digest(module),
        "weights": dict(sorted(places.items())),
        "layers": dict(sorted(Counter(type(part).__name__ for part in parts).items())),
        "compiled": sum(map(is_compiled, parts)),
        "hooks": dict(sorted(Counter(name for part in parts for name in _hooks(part)).items())),
        "tiles": getattr(module, "use_tiling", False),
        "attention": sorted({name for part in parts if (name := _back_end(part)) is not None}),
    }


def _class_name(weight: torch.Tensor) -> str:
    """The class of a weight: quantized ones have their own."""
    inner = getattr(weight, "data", weight)
    return type(inner).__name__


def _hooks(part: nn.Module) -> list[str]:
    registry = vars(part).get("_diffusers_hook")
    names = [*getattr(registry, "hooks", {})]
    return [*names, "accelerate"] if vars(part).get("_hf_hook") is not None else names


def _back_end(part: nn.Module) -> str | None:
    """The attention back end of a layer, where one was chosen."""
    processor = vars(part).get("processor")
    if (share := getattr(processor, "share", None)) is not None:
        return f"sparse {share}"
    backend = getattr(processor, "_attention_backend", None)
    config = getattr(part, "config", None)
    of_transformers = getattr(config, "_attn_implementation", None)
    label = backend or of_transformers
    return None if label is None else str(getattr(label, "value", label))


def _digest(module: nn.Module) -> str:
    """Of the configuration, without the folder that it came from."""
    config = getattr(module, "config", {})
    entries = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(entries, Mapping):
        return ""
    plain = {name: value for name, value in entries.items() if not name.startswith("_")}
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
