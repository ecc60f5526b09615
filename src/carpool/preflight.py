"""Checks of a model and its settings before loading.

`carpool serve` checks before it starts a worker, `carpool generate` before it imports torch. Checks
that need the loaded model follow later, with the same errors. No torch.
"""

import re
import sys
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path

from carpool.config import EngineSettings
from carpool.errors import LoraRejected, SettingRejected
from carpool.models.published import in_parts, shapes_in, shapes_on_hub
from carpool.models.source import check_hub, components_of, find, is_single_file
from carpool.request.adapter_names import split_target
from carpool.request.lora import adapter_file, check_header, check_name, parse_lora
from carpool.schedule.policy import weights
from carpool.settings import preparation
from carpool.settings.engine import DEVICES, OF_FILES
from carpool.settings.peers.sglang_rules import load_rules

_DEVICE = re.compile(r"auto|(cpu|mps)(:0)?|(cuda|xpu)(:[0-9]{1,3})?")


def check(model: str, settings: EngineSettings, factory: str | None = None) -> None:
    """Check the settings: device, shares, rules, adapters, the model.

    Args:
        factory: `module:function` that builds the pipeline, instead of `model`.

    Raises:
        SettingRejected: a setting has an impossible value, or names a missing file.
        LoraRejected: an adapter's name is taken, or its file is unreadable.
        LoadFailed: there is no such model.
    """
    if not all(_DEVICE.fullmatch(part) for part in settings.device.split("+")):
        devices = ", ".join(DEVICES)
        raise SettingRejected(f"device={settings.device!r}: must be auto, {devices}, or cuda:N")
    _check_utf8(model, settings)
    if factory is None:
        model, settings = in_parts(model, settings)
    weights(settings.fair_share)
    if settings.batching_mode == "dynamic" and settings.batching_config is not None:
        load_rules(Path(settings.batching_config))
    for name in ("lora_dir", "embeddings"):
        folder = getattr(settings, name)
        if folder is not None and not Path(folder).expanduser().is_dir():
            raise SettingRejected(f"{name}={folder!r}: there is no such folder")
    adapters = parse_lora(settings.lora)
    preparation.check_packages(settings)
    if factory is not None and settings.context_parallel > 1:
        raise SettingRejected(
            f"context_parallel={settings.context_parallel}: every rank loads the model itself: "
            f"save the pipeline of {factory} by save_pretrained, and serve that folder"
        )
    if factory is None and (shapes_in(model) or shapes_on_hub(model)) is not None:
        return  # its own package checks the content
    source, card = ("", {"lora": {}}) if factory is not None else find(model)
    if factory is not None:
        _check_factory(factory, settings)
    for name, path in adapters.items():
        check_name(name, list(card.get("lora", {})))
        try:
            check_header(adapter_file(Path(split_target(path)[0]).expanduser()))
        except (LoraRejected, OSError) as error:
            raise LoraRejected(f"adapter {name!r}: {error}") from error
    if factory is None:
        _check_files(source, settings, is_local=bool(card))


def _check_utf8(model: str, settings: EngineSettings) -> None:
    """Check that texts for workers are valid UTF-8."""
    for name, value in {"model": model, **asdict(settings)}.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and text.encode(errors="replace").decode() != text:
                rule = "its bytes are no UTF-8: rename it, or link to it by another name"
                raise SettingRejected(f"{name}={text!r}: {rule}")


def _check_files(source: str, settings: EngineSettings, *, is_local: bool) -> None:
    """Check the settings about a model's files."""
    config = source
    if is_single_file(source):
        for name in ("variant", "revision"):
            if (value := getattr(settings, name)) is not None:
                raise SettingRejected(f"{name}={value!r}: {source} is one file, and has no others")
        if settings.model_config is None:
            return  # diffusers infers it from the file, which needs torch
        config, card = find(settings.model_config)
        if is_single_file(config):
            rule = "must be the folder or hub id of a pipeline"
            raise SettingRejected(f"model_config={settings.model_config!r}: {rule}")
        is_local = bool(card)
    elif settings.model_config is not None:
        rule = f"is for a MODEL that is one file, and {source} is a whole pipeline: leave it out"
        raise SettingRejected(f"model_config={settings.model_config!r}: {rule}")
    if not is_local:
        check_hub(config, settings.revision)
    elif components := components_of(config):
        preparation.check_components(settings, components)


def _check_factory(factory: str, settings: EngineSettings) -> None:
    for name in OF_FILES:
        if (value := getattr(settings, name)) not in (None, "auto", ()):
            rule = "the function loads the pipeline itself; set it there"
            raise SettingRejected(f"{name}={value!r}: {rule}")
    place, _, function = factory.rpartition(":")
    if not place or not function:
        raise SettingRejected(f"pipeline={factory!r}: write MODULE:FUNCTION, as mine:build")
    if place.endswith(".py"):
        is_there = Path(place).is_file()
    else:
        top = place.partition(".")[0]
        is_there = bool(PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]))
    if not is_there:
        rule = "it must be in the current folder, installed, or a file's path"
        raise SettingRejected(f"pipeline={factory!r}: there is no module {place!r}: {rule}")
