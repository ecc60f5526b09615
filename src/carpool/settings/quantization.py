"""Kinds of quantized weights in settings. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.errors import SettingRejected, nearest
from carpool.settings.rules import by_component

_PACKAGES = {  # by backend, up to its "_"
    "torchao": "torchao",
    "quanto": "optimum.quanto",
    "gguf": "gguf",
    "bitsandbytes": "bitsandbytes",
}
_INT4 = {
    "quant_type": "Int4WeightOnlyConfig",
    "quant_kwargs": {"int4_packing_format": "tile_packed_to_4d"},
}
_NF4, _FP4 = ({"load_in_4bit": True, "bnb_4bit_quant_type": kind} for kind in ("nf4", "fp4"))
_FP8_DYNAMIC = {
    "quant_type": "Float8DynamicActivationFloat8WeightConfig",
    "quant_kwargs": {"granularity": "PerRow"},
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """A kind of quantized weights."""

    backend: str  # backend of diffusers' quantization, or "layerwise"
    options: Mapping[str, Any] = field(default_factory=dict)  # configuration of the backend
    needs_gpu: bool = False
    bits: int = 8  # bits of a weight
    instead: str = ""  # alternative on unsupported devices

    @property
    def package(self) -> str | None:
        """The package that computes with them; None: diffusers itself."""
        return _PACKAGES.get(self.backend.partition("_")[0])


KINDS: Mapping[str, Quantization] = {
    "int8": Quantization("torchao", {"quant_type": "Int8WeightOnlyConfig"}),
    "int8-dynamic": Quantization(
        "torchao", {"quant_type": "Int8DynamicActivationInt8WeightConfig"}
    ),
    "int4": Quantization("torchao", _INT4, needs_gpu=True, bits=4, instead="quanto-int4"),
    "fp8": Quantization("layerwise", {"storage_dtype": "float8_e4m3fn"}),
    "fp8-dynamic": Quantization("torchao", _FP8_DYNAMIC, needs_gpu=True, instead="fp8"),
    "nf4": Quantization("bitsandbytes_4bit", _NF4, bits=4, instead="quanto-int4"),
    "fp4": Quantization("bitsandbytes_4bit", _FP4, bits=4, instead="quanto-int4"),
    "llm-int8": Quantization("bitsandbytes_8bit", {"load_in_8bit": True}, instead="int8"),
    "quanto-int8": Quantization("quanto", {"weights_dtype": "int8"}),
    "quanto-int4": Quantization("quanto", {"weights_dtype": "int4"}, bits=4),
    "quanto-fp8": Quantization("quanto", {"weights_dtype": "float8"}),
}

STREAMED = ("torchao", "quanto")  # backends whose weights can be streamed


def quantizations(text: str | None) -> dict[str, Quantization]:
    """The kinds of quantized weights by component."""
    if text is None:
        return {}
    if text.lstrip().startswith("{"):
        return _from_json(text)
    names = by_component("quantize", text)
    for name in names.values():
        if name not in KINDS:
            rule = f"{nearest(name, KINDS)}: must be one of {', '.join(KINDS)}, or JSON"
            raise SettingRejected(f"quantize={text!r}: {name!r} is unknown{rule}")
    return {component: KINDS[name] for component, name in names.items()}


def _from_json(text: str) -> dict[str, Quantization]:
    rule = '{COMPONENT: {"quant_backend": NAME, and the backend\'s own options}}'
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingRejected(f"quantize is no JSON ({error}): write {rule}") from error
    quantizations = {}
    for component, options in data.items():
        backend = options.get("quant_backend") if isinstance(options, dict) else None
        if not isinstance(backend, str):
            raise SettingRejected(f"quantize: {component!r} has no quant_backend: write {rule}")
        arguments = {name: value for name, value in options.items() if name != "quant_backend"}
        quantizations[component] = Quantization(backend, arguments)
    return quantizations


def check_gpu(kind: Quantization, device: str) -> None:
    """Check that a kind of quantized weights runs on a device, by the device's type."""
    if kind.needs_gpu and device.startswith("cpu"):
        name = next((name for name, preset in KINDS.items() if preset == kind), kind.backend)
        problem = f"quantize={name}: needs a GPU; on a CPU take {kind.instead}"
        raise SettingRejected(problem, param="quantize")
