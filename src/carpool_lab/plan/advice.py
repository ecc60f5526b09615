"""The command lines for a plan: as it is, with fewer bits where it does not fit, or streamed.

What is proposed is accepted: a memory budget by the residency plan of the engine itself, over the
blocks of the model's modules.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import floor
from typing import TYPE_CHECKING

from carpool.engine.weights.placement import components_of
from carpool.engine.weights.residency import Component, gib
from carpool.engine.weights.residency import plan as residency
from carpool.errors import SettingRejected
from carpool.preparation import is_denoiser
from carpool.quantization import KINDS, STREAMED
from carpool.setting_rules import ALL, by_component, parse_bytes
from carpool_lab.plan.predict import VALUE_BYTES, Plan

if TYPE_CHECKING:
    from carpool_lab.plan.shapes import Model

LESS = ("fp8", "int8", "int4", "quanto-int4")  # proposed where weights do not fit, in this order


def bits_of(quantize: str | None, model: "Model") -> dict[str, int]:
    """Bits of a weight by component, as `--quantize` has them.

    Raises:
        SettingRejected: a kind or a component is unknown.
    """
    found: dict[str, int] = {}
    for component, kind in by_component("quantize", quantize).items():
        if kind not in KINDS or (component and component not in model.modules):
            known = f"kinds are {', '.join(KINDS)}; components {', '.join(model.modules)}"
            raise SettingRejected(f"quantize={quantize!r}: {known}")
        names = [component] if component else [n for n in model.modules if is_denoiser(n)]
        found |= dict.fromkeys(names, KINDS[kind].bits)
    return found


def commands(model: "Model", plan: Plan, quantize: str | None, is_compiled: bool) -> Iterator[str]:
    """The command lines to use, those of the plan's own figures first."""
    said = f"carpool serve {model.name} --max-batch-size {plan.knee}"
    compiled = " --compile" if is_compiled else ""
    if plan.fits:
        yield said + compiled + (f" --quantize {quantize}" if quantize else "")
        return
    yield from _streamed(model, plan, said, quantize, is_compiled)
    room = _room(plan)
    for kind in LESS:
        names = [name for name in model.modules if is_denoiser(name)]
        if kind != "fp8":  # which is for denoisers only
            names += [name for name in model.modules if "encoder" in name and name not in names]
        bits = {**dict.fromkeys(model.modules, 8 * VALUE_BYTES)}
        bits |= dict.fromkeys(names, KINDS[kind].bits)
        if sum(n * bits[name] / 8 for name, n in model.parameters().items()) <= room:
            less = ",".join(f"{name}={kind}" for name in names)
            yield f"{said}{compiled} --quantize {less}  # all of it fits"
            return


def _room(plan: Plan) -> float:
    """Bytes that weights may take on the device."""
    return sum(plan.weights.values()) - sum(plan.streamed.values())


def _below(n_bytes: float) -> str:
    """A size that is no larger, as people write it."""
    unit, size = ("GiB", 2**30) if n_bytes >= 2**30 else ("KiB", 2**10)
    return f"{max(0.0, floor(10 * n_bytes / size) / 10):.1f}{unit}"


def _streamed(
    model: "Model", plan: Plan, said: str, quantize: str | None, is_compiled: bool
) -> Iterator[str]:
    kinds = by_component("quantize", quantize)
    for component, kind in kinds.items():
        if KINDS[kind].backend not in STREAMED:
            instead = f"{component}=int8" if component != ALL else "int8"
            rule = f"those of {kind} cannot be streamed: --quantize {instead}"
            yield f"weights do not fit, and {rule}"
            return
    memory = _below(_room(plan))
    try:
        budget = parse_bytes("memory", memory)
        found = residency(_scaled(model, bits_of(quantize, model)), "auto", budget)
    except SettingRejected as error:
        yield f"weights do not fit, not even streamed ({error})"
        return
    quantized = f" --quantize {quantize}" if quantize else ""
    compiled = " --compile" if is_compiled and not any(map(is_denoiser, found.streamed)) else ""
    what = f"streams {gib(found.streamed_bytes)}: {', '.join(found.streamed)}"
    yield f"{said}{compiled} --memory {memory}{quantized}  # {what}"


def _scaled(model: "Model", bits: dict[str, int]) -> list[Component]:
    """The modules' weights as they are on the device: 16 bits each, or as they are quantized."""
    parameters, found = model.parameters(), []
    for one in components_of(model.modules):
        wanted = parameters[one.name] * bits.get(one.name, 8 * VALUE_BYTES) / 8
        scale = wanted / one.n_bytes if one.n_bytes else 1.0
        blocks = tuple(round(n * scale) for n in one.blocks_bytes)
        found.append(replace(one, fixed_bytes=round(one.fixed_bytes * scale), blocks_bytes=blocks))
    return found
