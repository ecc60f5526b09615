"""Residency: choose the components' blocks that stay on the device under a memory budget.

The most frequently read weights stay first: a byte of the denoiser is read at every step, a byte of
an encoder once. Blocks that do not fit are streamed through slots, which count towards the budget.
This module knows no device; sizes go in, a plan comes out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from carpool.errors import SettingRejected, nearest
from carpool.settings.rules import streamed_names

SLOTS = 2  # groups on the device at once: one computes while the next one loads
ACTIVATIONS = 0.2  # share of a device's memory left for activations, without a budget


@dataclass(frozen=True, slots=True)
class Component:
    """The weights of one module of a pipeline."""

    name: str
    fixed_bytes: int  # outside of blocks: always on the device
    blocks_bytes: tuple[int, ...]  # sizes of the streamable blocks, in order
    is_denoiser: bool = False

    @property
    def n_bytes(self) -> int:
        return self.fixed_bytes + sum(self.blocks_bytes)


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """The components and blocks that are streamed; everything else is resident."""

    streamed: Mapping[str, frozenset[int]] = field(default_factory=dict)  # blocks by component
    device_bytes: int = 0  # bytes of resident weights and slots
    streamed_bytes: int = 0


def plan(components: Sequence[Component], stream: str, budget_bytes: int | None) -> ResidencyPlan:
    """Choose the blocks that are streamed.

    Args:
        components: the pipeline's components.
        stream: `auto`, `none`, or names separated by commas, which are streamed as a whole.
        budget_bytes: bytes that weights may take on the device; None: there is no limit.

    Raises:
        SettingRejected: a name is unknown or has no blocks, or no plan fits the budget.
    """
    names = streamed_names(stream)
    total = sum(part.n_bytes for part in components)
    if names is None:
        if budget_bytes is None or total <= budget_bytes:
            return ResidencyPlan({}, total)
        return _auto(components, budget_bytes)
    by_name = {part.name: part for part in components}
    for name in names:
        if name not in by_name:
            hint = f"{nearest(name, list(by_name))}; it has {', '.join(by_name)}"
            raise SettingRejected(f"stream={name!r}: the pipeline has no such component{hint}")
        if not by_name[name].blocks_bytes:
            able = ", ".join(part.name for part in components if part.blocks_bytes) or "none"
            rule = "it has no blocks that could be loaded one after the other"
            raise SettingRejected(f"stream={name!r}: {rule}; components that have: {able}")
    residency = _plan(components, {name: frozenset(_all(by_name[name])) for name in names})
    if budget_bytes is not None and residency.device_bytes > budget_bytes:
        usage = f"stream={stream!r} leaves {gib(residency.device_bytes)} on the device"
        raise SettingRejected(f"memory={gib(budget_bytes)}: {usage}: stream=auto chooses what fits")
    return residency


def _auto(components: Sequence[Component], budget_bytes: int) -> ResidencyPlan:
    """Keep the blocks that fit, most frequently used first; stream the rest."""
    streamed = {part.name: set(_all(part)) for part in components if part.blocks_bytes}
    minimum = _plan(components, {n: frozenset(blocks) for n, blocks in streamed.items()})
    room = budget_bytes - minimum.device_bytes
    if room < 0:
        raise SettingRejected(
            f"memory={gib(budget_bytes)}: with all blocks streamed the weights still take "
            f"{gib(minimum.device_bytes)}, which is the least that can be asked for",
            param="memory",
        )
    for part in sorted(components, key=lambda part: (not part.is_denoiser, part.n_bytes)):
        sizes = part.blocks_bytes
        resident = _all(part) if sum(sizes) <= room else _spread(sizes, room)
        room -= sum(sizes[i] for i in resident)
        streamed.get(part.name, set()).difference_update(resident)
    return _plan(components, {n: frozenset(blocks) for n, blocks in streamed.items() if blocks})


def _all(part: Component) -> range:
    return range(len(part.blocks_bytes))


def _spread(sizes: Sequence[int], left_bytes: int) -> list[int]:
    """Choose the resident blocks: streamed bytes are spread evenly over all blocks.

    Blocks of one denoiser compute for about equally long, but FLUX's first ones have 2.4 times the
    weights of the others: copies are hidden best if each block has to hide equally many bytes.
    """
    streamed_bytes = float(sum(sizes) - left_bytes)
    while True:
        resident, due = [], 0.0
        for i, size in enumerate(sizes):
            due += streamed_bytes / len(sizes)
            if due < size / 2:
                resident.append(i)
            else:
                due -= size
        room = left_bytes - sum(sizes[i] for i in resident)
        if room >= 0:
            break
        streamed_bytes *= 1.01
    for i in sorted(set(range(len(sizes))) - set(resident), key=lambda i: -sizes[i]):
        if sizes[i] <= room:
            resident.append(i)
            room -= sizes[i]
    return resident


def _plan(components: Sequence[Component], streamed: Mapping[str, frozenset[int]]) -> ResidencyPlan:
    moved = [p.blocks_bytes[i] for p in components for i in streamed.get(p.name, frozenset())]
    total = sum(part.n_bytes for part in components)
    return ResidencyPlan(streamed, total - sum(moved) + SLOTS * max(moved, default=0), sum(moved))


def gib(n_bytes: int) -> str:
    """A size in readable form."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit = next((unit for unit, size in units.items() if n_bytes >= size), "B")
    return f"{n_bytes / units.get(unit, 1):.3g}{unit}"
