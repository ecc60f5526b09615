"""Quantized weights: configurations of the back ends, and float8 storage."""

from collections.abc import Collection, Mapping
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from carpool.config import EngineSettings
from carpool.errors import SettingRejected, nearest
from carpool.settings.preparation import is_denoiser
from carpool.settings.quantization import KINDS, Quantization, check_gpu, quantizations
from carpool.settings.rules import DEFAULT

BLOCK_IN, BLOCK_OUT = 64, 32  # features of layers for which bitsandbytes has kernels on CPUs


def kinds_of(settings: EngineSettings, modules: Collection[str]) -> dict[str, Quantization]:
    """The kinds of quantized weights that a model is to have, by component.

    Args:
        modules: names of the model's modules.

    Raises:
        SettingRejected: a component cannot be quantized like this.
    """
    said = quantizations(settings.quantize)
    if DEFAULT in said:
        kind = said.pop(DEFAULT)
        denoisers = [name for name in modules if is_denoiser(name)]
        if not denoisers:
            raise SettingRejected(
                f"quantize={settings.quantize!r}: the model has no transformer or UNet: name a "
                f"component, of {', '.join(sorted(modules))}"
            )
        said = {**dict.fromkeys(denoisers, kind), **said}
    for component, kind in said.items():
        if kind.backend == "layerwise" and not is_denoiser(component):
            raise SettingRejected(
                f"quantize={settings.quantize!r}: only denoisers can store weights as float8 by "
                f"layers, and {component} is none: take {component}=int8 or {component}=quanto-fp8"
            )
    return said


def quantization_of(
    kind: Quantization, library: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """The configuration by which a library reads weights as this kind; None for `layerwise`.

    Args:
        library: of the component's class, "diffusers" or "transformers".
        dtype: to compute in.
        device: to compute on.

    Raises:
        SettingRejected: the library has no such back end, or it does not take these options.
    """
    check_gpu(kind, device.type)
    if kind.backend == "layerwise":
        return None
    module = transformers if library == "transformers" else diffusers
    known: Mapping[str, Any] = module.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    if kind.backend not in known:
        raise SettingRejected(
            f"quantize: {library} has no quant_backend {kind.backend!r}"
            f"{nearest(kind.backend, known)}: it has {', '.join(known)}"
        )
    options = dict(kind.options)
    if kind.backend == "torchao":
        options = _torchao(options)
    elif kind.backend == "quanto" and library == "transformers":  # calls it by another name
        options["weights"] = options.pop("weights_dtype", "int8")
    elif kind.backend == "bitsandbytes_4bit":
        options.setdefault("bnb_4bit_compute_dtype", dtype)
    try:
        return known[kind.backend](**options)
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise SettingRejected(f"quantize: {kind.backend}: {error}") from error


def _torchao(options: dict[str, Any]) -> dict[str, Any]:
    """Options of torchao with its own objects in the place of their names."""
    import torchao.quantization as ao  # takes seconds

    name, given = str(options.pop("quant_type", "")), dict(options.pop("quant_kwargs", {}))
    if not name.endswith("Config") or not hasattr(ao, name):
        configs = [known for known in dir(ao) if known.endswith("Config")]
        raise SettingRejected(
            f"quantize: torchao has no quant_type {name!r}{nearest(name, configs)}: it has "
            f"{', '.join(configs)}"
        )
    if isinstance(granularity := given.get("granularity"), str):
        given["granularity"] = getattr(ao, granularity)()
    try:
        return {"quant_type": getattr(ao, name)(**given), **options}
    except (TypeError, ValueError, AssertionError) as error:
        raise SettingRejected(f"quantize: torchao's {name}: {error}") from error


def is_read_quantized(kind: Quantization, device: torch.device) -> bool:
    """Whether the libraries quantize weights of this kind while they read a folder.

    For bitsandbytes diffusers wants an accelerator, though it has kernels for CPUs.
    """
    return device.type != "cpu" or not kind.backend.startswith("bitsandbytes")


def quantize_read(module: nn.Module, kind: Quantization, dtype: torch.dtype) -> None:
    """Quantize the linear layers of a module that was read as it is, from a single file say.

    Layers that the options leave out, and those that the class keeps in float32, stay as they are.

    Raises:
        SettingRejected: its back end only quantizes while it reads a folder.
    """
    options = dict(kind.options)
    kept = (options.pop("modules_to_not_convert", None) or options.get("llm_int8_skip_modules"),
            getattr(module, "_keep_in_fp32_modules", None))  # fmt: skip
    layers = _linear_layers(module, [name for names in kept for name in names or ()])
    if kind.backend == "torchao":
        from torchao.quantization import quantize_

        wanted = _torchao(options)["quant_type"]
        quantize_(module, wanted, filter_fn=lambda _, path: path in layers)
    elif kind.backend == "quanto":
        from optimum import quanto

        quanto.quantize(module, weights=f"q{options.get('weights_dtype', 'int8')}", include=layers)
        quanto.freeze(module)
    elif kind.backend.startswith("bitsandbytes"):
        for path in layers:
            module.set_submodule(path, _bitsandbytes(module.get_submodule(path), options, dtype))
    else:
        able = [name for name, one in KINDS.items() if one.backend != kind.backend]
        raise SettingRejected(
            f"quantize: {kind.backend} does not quantize what is read from a single file: take one "
            f"of {', '.join(able)}, or a folder"
        )


def _linear_layers(module: nn.Module, kept: Collection[str]) -> list[str]:
    """Paths of linear layers, but for those that bear one of these names, or lie below one."""

    def is_kept(path: str) -> bool:
        return any(f".{name}." in f".{path}." for name in kept)

    return [
        path
        for path, one in module.named_modules()
        if isinstance(one, nn.Linear)
        and not isinstance(one, NonDynamicallyQuantizableLinear)
        and not is_kept(path)
    ]


def _bitsandbytes(layer: nn.Module, options: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """A layer as bitsandbytes has it; its weights are quantized when they are moved to a device."""
    import bitsandbytes as bnb  # takes seconds

    assert isinstance(layer, nn.Linear)
    shape = layer.in_features, layer.out_features, layer.bias is not None
    if options.get("load_in_8bit"):
        threshold = options.get("llm_int8_threshold", 6.0)
        made = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=threshold)
    else:
        made = bnb.nn.Linear4bit(
            *shape,
            compute_dtype=options.get("bnb_4bit_compute_dtype", dtype),
            compress_statistics=options.get("bnb_4bit_use_double_quant", False),
            quant_type=options.get("bnb_4bit_quant_type", "fp4"),
        )
        if layer.in_features % BLOCK_IN or layer.out_features % BLOCK_OUT:
            made.support_avx512bf16_for_cpu = False  # the others are computed another way there
    made.load_state_dict(layer.state_dict())
    quantized: nn.Module = made.to(layer.weight.device).requires_grad_(False)
    return quantized.train(layer.training)


def store_as_float8(module: nn.Module, storage: str, dtype: torch.dtype) -> None:
    """Keep the weights of a denoiser's layers as float8, and compute in another type.

    Source: diffusers' layerwise casting, which leaves out norms and embeddings.
    """
    module.enable_layerwise_casting(  # type: ignore[operator]
        storage_dtype=getattr(torch, storage), compute_dtype=dtype
    )
