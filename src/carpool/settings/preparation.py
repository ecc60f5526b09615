"""Settings for the preparation of a model: parsed and checked without torch.

Some settings are lists of `COMPONENT=VALUE`; a VALUE alone applies to all other components.
`carpool.engine.model.prepare` applies the settings.
"""

import re
from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING

from carpool.errors import SettingRejected, nearest
from carpool.settings.quantization import STREAMED, Quantization, check_gpu, quantizations
from carpool.settings.rules import DEFAULT, by_component, parse_bytes, streamed_names

if TYPE_CHECKING:
    from carpool.settings.engine import EngineSettings

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_SIZE = (0, 0)  # warm-up with the model's own size

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")

RING_BACK_ENDS = ("flash", "_native_flash", "_native_cudnn", "flash_hub", "_flash_3_hub", "sage")
"""Attention backends of diffusers that support ring attention."""


def is_denoiser(component: str) -> bool:
    """Return whether a component is a denoiser, by diffusers' naming conventions."""
    return component.startswith(("transformer", "unet", "prior", "decoder"))


def types(text: str) -> dict[str, str]:
    """The names of number types by component."""
    types_by_component = by_component("dtype", text)
    for name in types_by_component.values():
        if name not in DTYPES:
            rule = f"must be one of {', '.join(DTYPES)}{nearest(name, DTYPES)}"
            raise SettingRejected(f"dtype={text!r}: {rule}")
    return types_by_component


def replacements(components: tuple[str, ...]) -> dict[str, str]:
    """Parse the sources of replaced components, by name."""
    paths: dict[str, str] = {}
    for entry in components:
        name, _, where = entry.partition("=")
        if not name or not where:
            raise SettingRejected(f"component={entry!r}: write NAME=FILE_OR_MODEL")
        if name in paths:
            raise SettingRejected(f"component={entry!r}: there is another {name!r} already")
        paths[name] = where
    return paths


def sizes(text: str | None) -> list[tuple[int, int]]:
    """Sizes of a warm-up, (width_px, height_px); `DEFAULT_SIZE` for the model's own."""
    resolutions = []
    for entry in text.split(",") if text is not None else ():
        match = _SIZE.fullmatch(entry.strip())
        if match is None and entry.strip() != "default":
            raise SettingRejected(f"warmup={text!r}: write WIDTHxHEIGHT, as 1024x1024, or default")
        resolutions.append((int(match[1]), int(match[2])) if match else DEFAULT_SIZE)
    return resolutions


def check_form(settings: "EngineSettings") -> None:
    """Check the form of the settings of a model's preparation."""
    types(settings.dtype)
    by_component("place", settings.place, needs_name=True)
    replaced, kinds = replacements(settings.component), quantizations(settings.quantize)
    for component, where in replaced.items():
        check_gguf(settings, component, where)
    for kind in kinds.values():
        check_gpu(kind, settings.device)
    for width, height in sizes(settings.warmup):
        if width * height > settings.max_pixels:
            limit = f"max_pixels is {settings.max_pixels}"
            raise SettingRejected(f"warmup: {width}x{height} is never drawn: {limit}")
    _check_group(settings)
    if settings.compile and settings.numerics == "exact":
        problem = "compiled kernels differ by the width of a forward, and numerics is 'exact'"
        raise SettingRejected(f"compile: {problem}: leave one of them out")
    if settings.memory is not None:
        parse_bytes("memory", settings.memory)
    check_streamed(settings, streamed_names(settings.stream) or ())


def _check_group(settings: "EngineSettings") -> None:
    """Refuse settings that `context_parallel` excludes; see `carpool.engine.group`."""
    ranks, devices = settings.context_parallel, settings.device.split("+")
    if len(devices) not in (1, ranks):
        problem = f"names {len(devices)} devices, and context_parallel is {ranks}"
        raise SettingRejected(
            f"device={settings.device!r}: {problem}: name one for each", param="device"
        )
    if ranks == 1:
        return
    group = f"context_parallel={ranks}"
    if len(set(devices)) < len(devices) and not settings.device.startswith("cpu"):
        raise SettingRejected(f"device={settings.device!r}: {group} needs different devices")
    if settings.stream not in ("auto", "none") or settings.memory is not None:
        name = "memory" if settings.memory is not None else "stream"
        rule = f"ranks cannot stream weights, so leave {name} out"
        fix = "quantize=int8 or place=text_encoder=DEVICE needs less memory"
        raise SettingRejected(f"{group}: {rule}: {fix}", param=name)
    if settings.compile:
        problem = "compiled blocks are not proven with it: leave compile out"
        raise SettingRejected(f"{group}: {problem}", param="compile")
    if settings.isolation == "private":
        rule = "computes denoisers in several processes, which do not see changes of a request"
        problem = f"isolation='private': {group} {rule}: take isolation=shared"
        raise SettingRejected(problem, param="isolation")
    for name in by_component("place", settings.place):
        if is_denoiser(name):
            rule = f"computes {name} on the devices of the group: leave it out of place"
            raise SettingRejected(f"place={settings.place!r}: {group} {rule}", param="place")
    if settings.context_parallel_kind == "ring":
        rule = f"one of {', '.join(RING_BACK_ENDS)}"
        if settings.device.startswith("cpu"):
            rule = "on a CPU there is none: take context_parallel_kind=ulysses"
        elif settings.attention_backend in RING_BACK_ENDS:
            return
        need = "needs an attention_backend that returns the log-sum-exp"
        problem = f"context_parallel_kind='ring' {need}: {rule}"
        raise SettingRejected(problem, param="context_parallel_kind")


def component_quantization(settings: "EngineSettings", component: str) -> Quantization | None:
    """The quantization of a component, by the settings."""
    kinds = quantizations(settings.quantize)
    return kinds.get(component) or (kinds.get(DEFAULT) if is_denoiser(component) else None)


def is_gguf(file: str) -> bool:
    """Return whether a file name is a GGUF file (quantized weights)."""
    return file.lower().endswith(".gguf")


def check_gguf(settings: "EngineSettings", component: str, where: str) -> None:
    """Refuse to quantize a component that a GGUF file has already quantized."""
    if is_gguf(where) and component_quantization(settings, component) is not None:
        rule = f"and quantize has {component} too: leave one of them out"
        problem = f"{component}={where}: the file's weights are quantized, {rule}"
        raise SettingRejected(problem, param="quantize")


def check_streamed(settings: "EngineSettings", streamed: Collection[str]) -> None:
    """Refuse settings that streamed components, by name, do not support."""
    places = by_component("place", settings.place)
    for name in streamed:
        rule = f"blocks of {name} are streamed"
        if settings.compile and is_denoiser(name):
            fix = "leave compile out, or let the model fit: quantize=int8, or more memory"
            problem = f"{rule}, and compiled blocks cannot wait for their weights"
            raise SettingRejected(f"compile: {problem}: {fix}")
        kind = component_quantization(settings, name)
        if kind is not None and kind.backend not in STREAMED:
            problem = f"{rule}, which those of {kind.backend} cannot be"
            fix = f"take {name}=int8, or more memory, so that it fits"
            raise SettingRejected(f"quantize={settings.quantize!r}: {problem}: {fix}")
        if name in places:
            fix = f"leave {name} out of place, or of stream"
            problem = f"{rule}, to the device of the others"
            raise SettingRejected(f"place={settings.place!r}: {problem}: {fix}")


def check_packages(settings: "EngineSettings") -> None:
    """Check that the packages that the settings need are installed."""
    for component, where in replacements(settings.component).items():
        if is_gguf(where):
            _check_package("gguf", f"component={component}={where}")
    for kind in quantizations(settings.quantize).values():
        if kind.package is not None:
            alternative = f", or take {kind.instead}" if kind.instead else ""
            _check_package(kind.package, f"quantize={settings.quantize!r}", alternative)


def _check_package(package: str, setting: str, otherwise: str = "") -> None:
    try:
        is_there = find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        is_there = False
    if not is_there:
        name = package.replace(".", "-")
        raise SettingRejected(f"{setting}: needs {name}: pip install {name}{otherwise}")


def check_names(setting: str, names: Collection[str], components: Collection[str]) -> None:
    """Check that the model has the components that a setting names."""
    for name in names:
        if name != DEFAULT and name not in components:
            hint = f"{nearest(name, components)}; it has {', '.join(sorted(components))}"
            raise SettingRejected(f"{setting}: the model has no component {name!r}{hint}")


def check_components(settings: "EngineSettings", components: Collection[str]) -> None:
    """Check that a model has the components that settings name."""
    check_names("dtype", types(settings.dtype), components)
    check_names("quantize", quantizations(settings.quantize), components)
    check_names("component", replacements(settings.component), components)
    check_names("place", by_component("place", settings.place), components)
