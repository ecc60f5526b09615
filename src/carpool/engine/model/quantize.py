"""Quantized weights: configurations of the back ends, and float8 storage."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from carpool import jsonfile
from carpool.config import EngineSettings
from carpool.errors import SettingRejected, nearest
from carpool.settings.preparation import is_denoiser
from carpool.settings.quantization import KINDS, Quantization, check_gpu, quantizations
from carpool.settings.rules import DEFAULT

READ_METHODS: Mapping[str, tuple[str, str]] = {
    "quanto": ("optimum-quanto", ""),
    "torchao": ("torchao", ""),
    "bitsandbytes": ("bitsandbytes", "an accelerator"),
    "sdnq": ("sdnq", ""),
    "auto-round": ("auto-round", ""),
    "modelopt": ("nvidia-modelopt", ""),
    "nunchaku_lite": ("kernels", "a GPU of NVIDIA from Turing on, but for Hopper; nvfp4 Blackwell"),
    "bfl": ("", "one file, not a folder: scaled float8 is read by `--component`, nvfp4 is not"),
    "gguf": ("gguf", "one file, not a folder: `--component transformer=FILE.gguf` reads it"),
}
"""For folders with quantized weights, by method: the required package and other conditions."""

BLOCK_IN, BLOCK_OUT = 64, 32  # feature multiples for which bitsandbytes has CPU kernels


def kinds_of(settings: EngineSettings, modules: Collection[str]) -> dict[str, Quantization]:
    """The requested quantization of each component.

    Args:
        modules: names of the model's modules.

    Raises:
        SettingRejected: a component cannot be quantized like this.
    """
    schemes = quantizations(settings.quantize)
    if DEFAULT in schemes:
        kind = schemes.pop(DEFAULT)
        denoisers = [name for name in modules if is_denoiser(name)]
        if not denoisers:
            raise SettingRejected(
                f"quantize={settings.quantize!r}: the model has no transformer or UNet: name a "
                f"component, of {', '.join(sorted(modules))}"
            )
        schemes = {**dict.fromkeys(denoisers, kind), **schemes}
    for component, kind in schemes.items():
        if kind.backend == "layerwise" and not is_denoiser(component):
            raise SettingRejected(
                f"quantize={settings.quantize!r}: only denoisers can store weights as float8 by "
                f"layers, and {component} is none: take {component}=int8 or {component}=quanto-fp8"
            )
    return schemes


def quantization_of(
    kind: Quantization, library: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """The library's configuration for a kind of quantization; None for `layerwise`.

    Args:
        library: library of the component's class, "diffusers" or "transformers".
        dtype: compute dtype.
        device: compute device.

    Raises:
        SettingRejected: the library lacks the back end, or that rejects the options.
    """
    check_gpu(kind, device.type)
    if kind.backend == "layerwise":
        return None
    module = transformers if library == "transformers" else diffusers
    configs_by_backend: Mapping[str, Any] = module.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    if kind.backend not in configs_by_backend:
        raise SettingRejected(
            f"quantize: {library} has no quant_backend {kind.backend!r}"
            f"{nearest(kind.backend, configs_by_backend)}: it has {', '.join(configs_by_backend)}"
        )
    options = dict(kind.options)
    if kind.backend == "torchao":
        options = _torchao(options)
    elif kind.backend == "quanto" and library == "transformers":  # transformers has another name
        options["weights"] = options.pop("weights_dtype", "int8")
    elif kind.backend == "bitsandbytes_4bit":
        options.setdefault("bnb_4bit_compute_dtype", dtype)
    try:
        return configs_by_backend[kind.backend](**options)
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise SettingRejected(f"quantize: {kind.backend}: {error}") from error


def quantized_components(folder: Path) -> str:
    """Describe the quantized components of a folder, their requirements, and an alternative.

    Returns:
        "" without any.
    """
    notes = []
    for file in sorted(folder.glob("*/config.json")):
        try:
            method = jsonfile.loads(jsonfile.read(file))["quantization_config"]["quant_method"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        package, condition = READ_METHODS.get(method, ("", "what diffusers does not have"))
        needs = " and ".join(filter(None, (package, condition)))
        notes.append(f"{file.parent.name} is quantized by {method}, which needs {needs}")
    kinds = "int8, quanto-int4 or another of --quantize"
    return f"{'; '.join(notes)}: else take its plain weights, and {kinds}" if notes else ""


def _torchao(options: dict[str, Any]) -> dict[str, Any]:
    """Replace names in torchao's options by its objects."""
    import torchao.quantization as ao  # slow import

    name = str(options.pop("quant_type", ""))
    quantizer_options = dict(options.pop("quant_kwargs", {}))
    if not name.endswith("Config") or not hasattr(ao, name):
        configs = [config_name for config_name in dir(ao) if config_name.endswith("Config")]
        raise SettingRejected(
            f"quantize: torchao has no quant_type {name!r}{nearest(name, configs)}: it has "
            f"{', '.join(configs)}"
        )
    if isinstance(granularity := quantizer_options.get("granularity"), str):
        quantizer_options["granularity"] = getattr(ao, granularity)()
    try:
        return {"quant_type": getattr(ao, name)(**quantizer_options), **options}
    except (TypeError, ValueError, AssertionError) as error:
        raise SettingRejected(f"quantize: torchao's {name}: {error}") from error


def is_read_quantized(kind: Quantization, device: torch.device) -> bool:
    """Whether the libraries quantize weights of this kind while reading a folder.

    For bitsandbytes diffusers requires an accelerator, though it has CPU kernels.
    """
    return device.type != "cpu" or not kind.backend.startswith("bitsandbytes")


def quantize_read(module: nn.Module, kind: Quantization, dtype: torch.dtype) -> None:
    """Quantize the linear layers of a module that was read unquantized, as from a single file.

    Layers excluded by the options, and those kept in float32 by the class, stay unchanged.

    Raises:
        SettingRejected: its back end only quantizes while reading a folder.
    """
    options = dict(kind.options)
    skipped = (options.pop("modules_to_not_convert", None) or options.get("llm_int8_skip_modules"),
            getattr(module, "_keep_in_fp32_modules", None))  # fmt: skip
    layers = _linear_layers(module, [name for names in skipped for name in names or ()])
    if kind.backend == "torchao":
        from torchao.quantization import quantize_

        quant_type = _torchao(options)["quant_type"]
        quantize_(module, quant_type, filter_fn=lambda _, path: path in layers)
    elif kind.backend == "quanto":
        from optimum import quanto

        quanto.quantize(module, weights=f"q{options.get('weights_dtype', 'int8')}", include=layers)
        quanto.freeze(module)
    elif kind.backend.startswith("bitsandbytes"):
        for path in layers:
            module.set_submodule(path, _bitsandbytes(module.get_submodule(path), options, dtype))
    else:
        able = [name for name, entry in KINDS.items() if entry.backend != kind.backend]
        raise SettingRejected(
            f"quantize: {kind.backend} does not quantize what is read from a single file: take one "
            f"of {', '.join(able)}, or a folder"
        )


def _linear_layers(module: nn.Module, skipped: Collection[str]) -> list[str]:
    """Paths of linear layers, except those with one of these names in their path."""
    return [
        path
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear)
        and not isinstance(part, NonDynamicallyQuantizableLinear)
        and not any(f".{name}." in f".{path}." for name in skipped)
    ]


def _bitsandbytes(layer: nn.Module, options: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Convert a layer to bitsandbytes; its weights are quantized when moved to a device."""
    import bitsandbytes as bnb  # slow import

    assert isinstance(layer, nn.Linear)
    shape = layer.in_features, layer.out_features, layer.bias is not None
    if options.get("load_in_8bit"):
        threshold = options.get("llm_int8_threshold", 6.0)
        layer_quantized = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=threshold)
    else:
        layer_quantized = bnb.nn.Linear4bit(
            *shape,
            compute_dtype=options.get("bnb_4bit_compute_dtype", dtype),
            compress_statistics=options.get("bnb_4bit_use_double_quant", False),
            quant_type=options.get("bnb_4bit_quant_type", "fp4"),
        )
        if layer.in_features % BLOCK_IN or layer.out_features % BLOCK_OUT:
            # other sizes have no such kernel
            layer_quantized.support_avx512bf16_for_cpu = False
    layer_quantized.load_state_dict(layer.state_dict())
    quantized: nn.Module = layer_quantized.to(layer.weight.device).requires_grad_(False)
    return quantized.train(layer.training)
