"""The settings that decided an output, as they were used: the request's own, and all defaults.

Files, jobs and answers contain them, so that the same settings give the same image after defaults
of a server, a model or a library have changed. The part `engine` holds settings that no request can
choose: the scheduler, dtypes, versions.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import diffusers

import carpool
from carpool.config import EngineSettings
from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.model.samplers import exchanged
from carpool.request.card import INTERNAL, Task
from carpool.request.images import NAMES as PICTURES
from carpool.request.images import size_of
from carpool.request.values import is_json
from carpool.types import CheckedRequest, phase_of

_UNSAID = {*INTERNAL, *PICTURES, "output_type"}


class SettingsUsed:
    """Collects the used settings of one engine's requests."""

    def __init__(self, loaded: LoadedPipeline, settings: EngineSettings) -> None:
        self._card, self._step_cache = loaded.card, settings.step_cache
        self._engine, self._loaded = _engine(loaded, settings), loaded

    def of(self, request: CheckedRequest, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a request.

        Args:
            fields: fields of its output; the size is read from images and frames, not from latents.
        """
        task = self._card.task(request.task)
        arguments = request.arguments
        plain = {name: value for name, value in arguments.items() if is_json(value)}
        settings = _defaults(task, arguments) | plain
        settings = {name: value for name, value in settings.items() if name not in _UNSAID}
        for name in ("sigmas", "timesteps"):  # one entry per step
            if isinstance(entries := plain.get(name), (list, tuple)):
                settings["num_inference_steps"] = len(entries)
        if request.arguments.get("output_type", request.output_type) != "latent":
            is_pasted = plain.get("padding_mask_crop") is not None  # the input image's size
            settings |= {n: v for n, v in _size(fields).items() if not (is_pasted and n in plain)}
        if request.lora:
            settings["lora"] = [{"id": name, "scale": scale} for name, scale in request.lora]
        threshold = self._step_cache if request.step_cache is None else request.step_cache
        settings |= {"step_cache": threshold} if threshold else {}
        settings |= {"enhance_prompt": True} if request.enhance_prompt else {}
        settings |= {"prompt_weights": True} if request.prompt_weights else {}
        return settings | self._sampler(request.scheduler)

    def _sampler(self, name: str | None) -> dict[str, Any]:
        if name is None:
            return {"engine": self._engine}
        scheduler = exchanged(self._loaded.pipe.scheduler, name)
        facts = {"scheduler": type(scheduler).__name__, "scheduler_config": _changed(scheduler)}
        return {"scheduler": name, "engine": {**self._engine, **facts}}


def _defaults(task: Task, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The pipeline's defaults for missing arguments."""
    defaults = {p.name: p.default for p in task.parameters if p.default not in (None, "")}
    if not any(name in arguments for name in PICTURES):
        defaults.pop("strength", None)  # strength needs an input image
    return defaults


def _size(fields: Mapping[str, Any]) -> dict[str, int]:
    """Width and height of the first image or frame of an output."""
    first = fields.get("frames", fields.get("images"))
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    size = size_of(first)
    return {} if size is None else {"width": size[0], "height": size[1]}


def _engine(loaded: LoadedPipeline, settings: EngineSettings) -> dict[str, Any]:
    """The engine's part of the settings that decide an output."""
    scheduler = getattr(loaded.pipe, "scheduler", None)
    denoisers = (module for name, module in loaded.modules.items()
                 if phase_of(name, "forward") == "denoise")  # fmt: skip
    dtype = getattr(next(denoisers, None), "dtype", None)
    facts = {
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "scheduler_config": _changed(scheduler),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "numerics": settings.numerics,
        "quantize": settings.quantize or None,
        "revision": settings.revision,
        "pipeline": type(loaded.pipe).__name__,
        "versions": {"carpool": carpool.__version__, "diffusers": diffusers.__version__},
    }
    return {name: value for name, value in facts.items() if value is not None and is_json(value)}


def _changed(scheduler: Any) -> dict[str, Any] | None:
    """The entries of a scheduler's configuration that differ from its class's defaults."""
    config = getattr(scheduler, "config", None)
    if not isinstance(config, Mapping):
        return None
    takes = inspect.signature(type(scheduler).__init__).parameters
    return {
        name: value
        for name, value in config.items()
        if name in takes and value is not None and is_json(value) and value != takes[name].default
    }
