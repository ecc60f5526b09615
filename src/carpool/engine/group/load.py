"""Load a model, by the settings in this process alone or in a group of processes."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from carpool.config import EngineSettings
from carpool.engine.group.context_parallel import BACK_ENDS, check_classes
from carpool.engine.group.leader import Followers
from carpool.engine.model.device import Device
from carpool.engine.model.load import load as load_alone
from carpool.engine.model.loaded import LoadedPipeline
from carpool.errors import SettingRejected


def load(model: str | Path | DiffusionPipeline, settings: EngineSettings) -> LoadedPipeline:
    """Like `carpool.engine.model.load.load`; with `context_parallel`, in a group of processes.

    Raises:
        LoadFailed: as in `load_alone`, or a rank could not load or join.
        SettingRejected: as in `load_alone`, or a group cannot compute the model.
    """
    ranks = settings.context_parallel
    if ranks == 1:
        return load_alone(model, settings)
    if isinstance(model, DiffusionPipeline):
        raise SettingRejected(
            f"context_parallel={ranks}: every rank loads the model itself, which a loaded pipeline "
            "does not allow: save it with save_pretrained, and give that folder",
            param="context_parallel",
        )
    leader, *followers = by_rank(settings)
    with ExitStack() as undo:
        groups: list[Followers] = []

        def begin(source: str, classes: Mapping[str, type]) -> None:
            components = check_classes(classes, ranks)
            spare_components = [name for name in classes if name not in components]
            device = Device(leader).torch
            groups.append(Followers(source, followers, device, components, spare_components))
            undo.callback(groups[0].close)

        def join(modules: Mapping[str, nn.Module]) -> None:
            components = check_classes({n: type(module) for n, module in modules.items()}, ranks)
            groups[0].join({name: modules[name] for name in components})

        loaded = load_alone(model, leader, begin=begin, prepared=join)
        undo.callback(loaded.undo)
        return replace(loaded, group=groups[0], undo=undo.pop_all().close)


def by_rank(settings: EngineSettings) -> list[EngineSettings]:
    """The settings of each rank of a group, with a device of its own.

    Raises:
        SettingRejected: there are fewer devices than ranks.
    """
    ranks = settings.context_parallel
    named = settings.device.split("+")
    if len(named) == 1:
        device = Device(settings)
        if device.type not in BACK_ENDS:
            raise SettingRejected(
                f"context_parallel={ranks}: torch.distributed knows no {device.type}: it computes "
                f"together on {', '.join(BACK_ENDS)}",
                param="context_parallel",
            )
        named = ["cpu"] * ranks
        if device.is_accelerator:
            named = [f"{device.type}:{rank}" for rank in range(ranks)]
    common: dict[str, Any] = {"place": None, "vae_tiling": False, "warmup": None, "lora": ()}
    leader = replace(settings, device=named[0])
    return [leader, *(replace(settings, device=name, **common) for name in named[1:])]
