"""Quantized weights: configurations of the back ends, and float8 storage."""

from collections.abc import Collection, Mapping
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from carpool.config import EngineSettings
from carpool.errors import SettingRejected, nearest
from carpool.preparation import is_denoiser
from carpool.quantization import KINDS, Kind, quantizations
from carpool.setting_rules import ALL


def kinds_of(settings: EngineSettings, modules: Collection[str]) -> dict[str, Kind]:
    """The kinds of quantized weights that a model is to have, by component.

    Args:
        modules: names of the model's modules.

    Raises:
        SettingRejected: a component cannot be quantized like this.
    """
    said = quantizations(settings.quantize)
    if ALL in said:
        kind = said.pop(ALL)
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


def quantization_of(kind: Kind, library: str, dtype: torch.dtype) -> Any:
    """The configuration by which a library reads weights as this kind; None for `layerwise`.

    Args:
        library: of the component's class, "diffusers" or "transformers".
        dtype: to compute in.

    Raises:
        SettingRejected: the library has no such back end, or it does not take these options.
    """
    if kind.backend == "layerwise":
        return None
    module = diffusers if library == "diffusers" else transformers
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


def quantize_read(module: nn.Module, config: Any) -> None:
    """Quantize a module that was read from a single file: diffusers' loader leaves that out.

    Args:
        config: of `quantization_of`.

    Raises:
        SettingRejected: its back end only quantizes while it reads a folder.
    """
    if not isinstance(config, diffusers.TorchAoConfig):
        able = [name for name, kind in KINDS.items() if kind.backend in ("torchao", "layerwise")]
        raise SettingRejected(
            f"quantize: {config.quant_method.value} does not quantize what is read from a single "
            f"file: take one of {', '.join(able)}, or a folder"
        )
    from torchao.quantization import quantize_

    quantize_(module, config.quant_type)


def store_as_float8(module: nn.Module, storage: str, dtype: torch.dtype) -> None:
    """Keep the weights of a denoiser's layers as float8, and compute in another type.

    Source: diffusers' layerwise casting, which leaves out norms and embeddings.
    """
    module.enable_layerwise_casting(  # type: ignore[operator]
        storage_dtype=getattr(torch, storage), compute_dtype=dtype
    )
