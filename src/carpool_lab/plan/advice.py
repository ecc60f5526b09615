"""The command lines for a plan: unchanged, with fewer bits if it does not fit, or streamed.

`carpool serve` accepts all proposals: memory budgets come from the engine's own residency plan,
over the blocks of the model's modules.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import floor
from shlex import quote
from typing import TYPE_CHECKING

from torch import nn

from carpool.config import EngineSettings
from carpool.engine.model.quantize import kinds_of
from carpool.engine.weights.placement import components_of
from carpool.engine.weights.residency import Component, gib
from carpool.engine.weights.residency import plan as residency
from carpool.errors import SettingRejected
from carpool.settings.preparation import check_names, is_denoiser
from carpool.settings.quantization import STREAMED, Quantization, quantizations
from carpool.settings.rules import parse_bytes
from carpool_lab.plan.predict import VALUE_BYTES, Plan

if TYPE_CHECKING:
    from carpool_lab.plan.shapes import ModelShapes

ALL_FITS = "  # all of it fits"
SMALLER_KINDS = (
    "fp8",
    "int8",
    "int4",
    "quanto-int4",
)  # proposals if weights do not fit, in this order


def kinds_in(quantize: str | None, model: "ModelShapes") -> dict[str, Quantization]:
    """Parse `--quantize` to kinds of quantized weights by component, as the engine does.

    Raises:
        SettingRejected: a kind or a component is unknown, or they do not fit together.
    """
    check_names("quantize", quantizations(quantize), model.modules)
    return kinds_of(EngineSettings(quantize=quantize), model.modules)


def bits_of(quantize: str | None, model: "ModelShapes") -> dict[str, float]:
    """Mean bits of a weight by component: only linear layers are quantized.

    Layerwise float8 quantizes all weights except vectors.

    Raises:
        SettingRejected: see `kinds_in`.
    """
    kinds = kinds_in(quantize, model)
    return {name: _mean_bits(model.modules[name], kind) for name, kind in kinds.items()}


def _mean_bits(module: nn.Module, kind: Quantization) -> float:
    whole = 8.0 * VALUE_BYTES
    every = sum(weight.numel() for weight in module.parameters())
    if kind.backend == "layerwise":
        changed = sum(weight.numel() for weight in module.parameters() if weight.ndim > 1)
    else:
        layers = (part for part in module.modules() if isinstance(part, nn.Linear))
        changed = sum(weight.numel() for weight in {part.weight for part in layers})
    return whole - (whole - kind.bits) * changed / every


def commands(
    model: "ModelShapes", plan: Plan, quantize: str | None, is_compiled: bool
) -> Iterator[str]:
    """The command lines; the first ones match the plan's numbers."""
    command = f"carpool serve {quote(model.model_id)} --max-batch-size {plan.knee}"
    compiled = " --compile" if is_compiled else ""
    if plan.fits:
        yield command + compiled + (f" --quantize {quantize}" if quantize else "")
        return
    yield from _streamed(model, plan, command, quantize, is_compiled)
    room = _room(plan)
    for kind in SMALLER_KINDS:
        names = [name for name in model.modules if is_denoiser(name)]
        if kind != "fp8":  # fp8 supports denoisers only
            names += [name for name in model.modules if "encoder" in name and name not in names]
        flags = ",".join(f"{name}={kind}" for name in names)
        bits = dict.fromkeys(model.modules, 8.0 * VALUE_BYTES) | bits_of(flags, model)
        if sum(n * bits[name] / 8 for name, n in model.parameters().items()) <= room:
            yield f"{command}{compiled} --quantize {flags}{ALL_FITS}"
            return


def answer(plan: Plan, lines: list[str], quantize: str | None) -> str:
    """A short text whether a model fits.

    Args:
        lines: its command lines.
    """
    if plan.fits:
        return "fits quantized" if quantize else "fits"
    if lines[-1].endswith(ALL_FITS):
        return "fits quantized"
    return "streams" if lines[0].startswith("carpool") else "does not fit"


def _room(plan: Plan) -> float:
    """Bytes for weights on the device."""
    return sum(plan.weights.values()) - sum(plan.streamed.values())


def _below(n_bytes: float) -> str:
    """A size, rounded down, with a unit."""
    unit, size = ("GiB", 2**30) if n_bytes >= 2**30 else ("KiB", 2**10)
    return f"{max(0.0, floor(10 * n_bytes / size) / 10):.1f}{unit}"


def _streamed(
    model: "ModelShapes", plan: Plan, command: str, quantize: str | None, is_compiled: bool
) -> Iterator[str]:
    for component, kind in kinds_in(quantize, model).items():
        if kind.backend not in STREAMED:
            rule = f"weights of {kind.backend} cannot be streamed: --quantize {component}=int8"
            yield f"weights do not fit, and {rule}"
            return
    memory = _below(_room(plan))
    try:
        budget = parse_bytes("memory", memory)
        placement = residency(_scaled(model, bits_of(quantize, model)), "auto", budget)
    except SettingRejected as error:
        yield f"weights do not fit, not even streamed ({error})"
        return
    quantized = f" --quantize {quantize}" if quantize else ""
    compiled = " --compile" if is_compiled and not any(map(is_denoiser, placement.streamed)) else ""
    note = f"streams {gib(placement.streamed_bytes)}: {', '.join(placement.streamed)}"
    yield f"{command}{compiled} --memory {memory}{quantized}  # {note}"


def _scaled(model: "ModelShapes", bits: dict[str, float]) -> list[Component]:
    """The modules' weights on the device: 16 bits each, or quantized."""
    parameters, scaled = model.parameters(), []
    for component in components_of(model.modules):
        target_bytes = parameters[component.name] * bits.get(component.name, 8 * VALUE_BYTES) / 8
        scale = target_bytes / component.n_bytes if component.n_bytes else 1.0
        blocks = tuple(round(n * scale) for n in component.blocks_bytes)
        scaled.append(
            replace(
                component, fixed_bytes=round(component.fixed_bytes * scale), blocks_bytes=blocks
            )
        )
    return scaled
