"""Place the weights of a pipeline by settings: on its device, or in a store to stream from."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from carpool.config import EngineSettings
from carpool.engine.weights.backing_store import (
    HOST_SHARE,
    DiskStore,
    PinnedStore,
    Store,
    free_host_bytes,
)
from carpool.engine.weights.bus import Bus
from carpool.engine.weights.groups import HOOK, blocks_of, bytes_of, plain_weights
from carpool.engine.weights.mapped_files import MappedFiles
from carpool.engine.weights.residency import ACTIVATIONS, Component, gib, plan
from carpool.engine.weights.streaming import Streamer
from carpool.errors import LoadFailed
from carpool.settings.preparation import check_streamed
from carpool.settings.rules import by_component, parse_bytes, streamed_names
from carpool.types import phase_of

log = logging.getLogger("carpool")


def is_asked_for(settings: EngineSettings) -> bool:
    """Whether the settings request a placement of weights."""
    return settings.memory is not None or settings.stream != "auto"


def place(
    modules: Mapping[str, nn.Module],
    device: torch.device,
    settings: EngineSettings,
    memory_gib: float | None,
) -> Streamer | None:
    """Move the modules' weights to the device up to the budget, and stream the rest.

    Args:
        modules: the pipeline's modules by component, on the host.
        device: the device on which they compute.
        settings: `memory`, `stream` and `stream_dir`.
        memory_gib: the device's memory; None: no limit.

    Returns:
        The streamer of the rest; None: all weights fit on the device, and none was moved.

    Raises:
        SettingRejected: no plan fits, a name is wrong, or another setting excludes streaming.
        LoadFailed: the weights are offloaded already, or there is no space for the store.
    """
    budget = None if memory_gib is None else int(memory_gib * 2**30 * (1 - ACTIVATIONS))
    if settings.memory is not None:
        budget = parse_bytes("memory", settings.memory)
    if budget is None and not streamed_names(settings.stream):  # no choice to make
        return None
    elsewhere = by_component("place", settings.place)
    modules = {name: module for name, module in modules.items() if name not in elsewhere}
    residency = plan(components_of(modules), settings.stream, budget)
    if not residency.streamed:
        return None
    for name in residency.streamed:
        _refuse_if_offloaded(name, modules[name])
    check_streamed(settings, residency.streamed)
    paths_of = {
        name: [path for i, path in enumerate(blocks_of(modules[name])) if i in streamed]
        for name, streamed in residency.streamed.items()
    }
    for name, module in modules.items():
        if name not in paths_of:
            module.to(device)
    blocks = [modules[n].get_submodule(path) for n, paths in paths_of.items() for path in paths]
    store = _store(device, settings, blocks)
    streamed = ", ".join(f"{len(paths)} blocks of {name}" for name, paths in paths_of.items())
    sizes = gib(residency.device_bytes), device, gib(residency.streamed_bytes), store.source
    log.info("%s of weights stay on %s; %s are streamed from %s: %s", *sizes, streamed)
    bus = Bus(store, device)
    try:
        streamer = Streamer({name: modules[name] for name in paths_of}, paths_of, device, bus)
    except BaseException:
        bus.close()
        raise
    try:  # only now: diffusers' hooks have moved all hooked modules to the host
        for name, paths in paths_of.items():
            _move_rest(modules[name], "", frozenset(paths), device)
    except BaseException:
        streamer.remove()
        raise
    return streamer


def components_of(modules: Mapping[str, nn.Module]) -> list[Component]:
    """The sizes of modules' weights, for `residency.plan`."""
    components = []
    for name, module in modules.items():
        sizes = tuple(bytes_of(block) for block in blocks_of(module).values())
        is_denoiser = phase_of(name, "forward") == "denoise" and not hasattr(module, "decode")
        components.append(Component(name, bytes_of(module) - sum(sizes), sizes, is_denoiser))
    return components


def is_offloaded(module: nn.Module) -> bool:
    """Whether other code offloads weights of a module."""
    for part in module.modules():
        registry = getattr(part, "_diffusers_hook", None)
        if registry is not None and registry.get_hook(HOOK) is not None:
            return True
        if getattr(getattr(part, "_hf_hook", None), "offload", False):
            return True
    return False


def _refuse_if_offloaded(name: str, module: nn.Module) -> None:
    if is_offloaded(module):
        raise LoadFailed(
            f"{name} is offloaded already: give Carpool the pipeline without offloading, or leave "
            "out memory and stream"
        )


def _move_rest(module: nn.Module, path: str, blocks: frozenset[str], device: torch.device) -> None:
    """Move the weights outside of the chosen blocks."""
    if path in blocks:
        return
    if path and not any(block.startswith(f"{path}.") for block in blocks):
        module.to(device)
        return
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data = tensor.data.to(device)
    for name, child in module.named_children():
        _move_rest(child, f"{path}.{name}".lstrip("."), blocks, device)


def _store(device: torch.device, settings: EngineSettings, blocks: list[nn.Module]) -> Store:
    """Pinned memory for an accelerator, while the host has enough; else the disk.

    Weights that the checkpoint stores in the form used are read from there, and only the others
    are written, unless `stream_dir` is set: then all are written there.
    """
    n_bytes = sum(map(bytes_of, blocks))
    is_short = n_bytes > HOST_SHARE * free_host_bytes()
    if device.type != "cpu" and settings.stream_dir is None and not is_short:
        return PinnedStore()
    if settings.stream_dir is not None:
        return DiskStore(folder_of(settings), n_bytes)
    mapped = MappedFiles()
    weights = [value for block in blocks for value in plain_weights(block)]
    for value in weights:
        mapped.read_by_page(value)
    copied_bytes = sum(value.nbytes for value in weights if mapped.place_of(value) is None)
    return DiskStore(folder_of(settings), copied_bytes, mapped)


def folder_of(settings: EngineSettings) -> Path:
    """The folder of files with weights."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carpool"
    return cache if settings.stream_dir is None else Path(settings.stream_dir).expanduser()
