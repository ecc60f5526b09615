"""A diffusers pipeline: load it, describe it, make a private view of it for each request.

The only module beside `intercept.py` that knows diffusers. The pipeline's code is never changed.
"""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, WanPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import logging as diffusers_log
from torch import nn
from transformers.utils import logging as transformers_log

from carpool import jsonfile
from carpool.config import EngineSettings
from carpool.engine.model.device import Device
from carpool.engine.model.dmd import DMDScheduler
from carpool.engine.model.tasks import tasks_of
from carpool.engine.tokenizers import LONG_TEXT
from carpool.errors import LoadFailed
from carpool.models import embedded
from carpool.request.lora import parse_lora
from carpool.request.parameters import Card, Task
from carpool.schedule.peers.sglang_rules import Server
from carpool.types import CheckedRequest

CARD_FILE = "carpool.json"
"""Optional, beside a local model's `model_index.json`: its public id, values for what requests
leave out, and its largest picture: {"id": ..., "defaults": {...}, "max_pixels": ...}."""


EMBEDDED = {"shapes": embedded.MODEL_DIR, "shapes-video": embedded.VIDEO_MODEL_DIR}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pipeline on its device, ready to be intercepted."""

    pipe: DiffusionPipeline
    card: Card
    device: Device
    originals: Mapping[str, tuple[DiffusionPipeline, type]]  # by task; see `_pinned` for the class
    lora: Mapping[str, str | Path] = field(default_factory=dict)  # adapters to begin with, by name
    source: str = ""  # the model as it was asked for

    @property
    def vae_scale_px(self) -> int:
        """Pixels along a side that one latent place stands for."""
        names = ("vae_scale_factor_spatial", "vae_scale_factor")
        found = (getattr(self.pipe, name, None) for name in names)
        return int(next((factor for factor in found if factor), 8))

    @property
    def server(self) -> Server:
        """What rules of batching configs may ask."""
        modules = [m for m in self.pipe.components.values() if isinstance(m, nn.Module)]
        parts = (part for module in modules for part in module.modules())
        is_offloaded = any(hasattr(part, "_diffusers_hook") for part in parts)
        return Server(self.source, self.device.memory_gib, is_offloaded)

    @property
    def parameters(self) -> int:
        """Weights in all modules."""
        modules = [m for m in self.pipe.components.values() if isinstance(m, nn.Module)]
        return sum(weight.numel() for module in modules for weight in module.parameters())


def load(model: str | Path | DiffusionPipeline, settings: EngineSettings) -> Loaded:
    """Load a pipeline: an embedded one, a hub id, a local folder, or one that is there already.

    Only safetensors weights are read, and no code from the checkpoint is run.

    Raises:
        LoadFailed: it is not to be had, or cannot be served as it is.
        SettingRejected: the device does not exist.
    """
    device = Device(settings)
    extra: Mapping[str, Any] = {}
    if isinstance(model, DiffusionPipeline):
        pipe, name = model, type(model).__name__
    else:
        source, extra = _source(model)
        name = str(extra.get("id", model))
        try:
            pipe = _from_pretrained(source, settings.revision, device.dtype)
        except (OSError, ValueError, TypeError, AttributeError, ImportError, LookupError) as error:
            raise LoadFailed(f"cannot load {model!s}: {error}") from error
        except RecursionError as error:
            raise _too_deep(model) from error
        pipe.to(device.torch)
    _refuse_what_breaks(pipe)
    _keep_vae_exact(pipe)
    for module in pipe.components.values():
        if isinstance(module, nn.Module):
            module.eval().requires_grad_(False)
    try:
        tasks = tasks_of(pipe)
    except RecursionError as error:  # a scheduler that cannot be copied
        raise _too_deep(model) from error
    for _, one in tasks.values():
        one.set_progress_bar_config(disable=True)
    return Loaded(
        pipe,
        describe(pipe, name, extra, settings, tuple(task for task, _ in tasks.values())),
        device,
        {name: (one, _pinned(one)) for name, (_, one) in tasks.items()},
        {**extra.get("lora", {}), **parse_lora(settings.lora)},
        source=name if isinstance(model, DiffusionPipeline) else str(model),
    )


def _too_deep(model: object) -> LoadFailed:
    return LoadFailed(f"cannot load {model!s:.200}: the lists or objects of a file nest too deep")


def _from_pretrained(source: str, revision: str | None, dtype: torch.dtype) -> DiffusionPipeline:
    """The pipeline of a folder or hub id, in its own class or the one that stands in for it."""
    given = {"revision": revision, "dtype": dtype, "use_safetensors": True}
    config = DiffusionPipeline.load_config(source, revision=revision)
    if config.get("_class_name") == "WanDMDPipeline":  # FastWan: not in diffusers
        return WanPipeline.from_pretrained(source, scheduler=DMDScheduler(), **given)
    return DiffusionPipeline.from_pretrained(source, **given)


def view(loaded: Loaded, task: str) -> Any:
    """A request's own copy: shared modules, private scheduler and attributes.

    Pipelines keep the state of a call on `self` and in their scheduler. At the end of a call they
    reset hooks of modules that others are still using, which the copy does not.
    """
    original, view_class = loaded.originals[task]
    mine = copy.copy(original)
    mine.__class__ = view_class
    for name, component in vars(original).items():
        if isinstance(component, SchedulerMixin):
            config = component.config  # frozen: shared
            setattr(mine, name, copy.deepcopy(component, {id(config): config}))
    mine.maybe_free_model_hooks = lambda: None
    return mine


def _pinned(pipe: DiffusionPipeline) -> type:
    """The pipeline's class with its device as a constant.

    Diffusers looks at every submodule each time it is asked for the device, which costs each
    request milliseconds; while an engine runs, the device cannot change.
    """
    cls = type(pipe)
    pins = {"_execution_device": pipe._execution_device, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), pins)


def call(mine: Any, job: CheckedRequest, card: Card) -> Any:
    """Run the pipeline for a job. Random numbers are drawn on the CPU: the same on any device."""
    arguments = dict(job.arguments)
    names = {parameter.name for parameter in card.task(job.task).parameters}
    if "generator" in names:
        arguments["generator"] = torch.Generator().manual_seed(job.seed)
        if isinstance(getattr(mine, "scheduler", None), DMDScheduler):
            mine.scheduler.generator = arguments["generator"]
    if "output_type" in names and arguments.get("output_type") != "latent":
        arguments["output_type"] = "pt"  # never PIL here: that would wait for the device
    return mine(**arguments)


def finish(
    output: Any, job: CheckedRequest, to_host: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """The fields of a pipeline's output, on the host, in the type that was asked for.

    Args:
        output: of `call`: `images` (1, C, H, W) or a list of (layers, C, H, W), or `frames`
            (1, F, C, H, W), values 0-1; anything else, such as sound, stays a tensor.
        job: its `output_type`: "pil" (the default), "np", "pt" or "latent".
        to_host: copies a tensor from the device; may wait for it.
    """
    kind = job.arguments.get("output_type", "pil")
    fields = dict(output.items()) if isinstance(output, Mapping) else {"images": output}
    return {
        name: _convert(value, kind if name in ("images", "frames") else "pt", to_host)
        for name, value in fields.items()
    }


def _convert(value: Any, kind: str, to_host: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_convert(entry, kind, to_host) for entry in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = to_host(value)
    if kind in ("pt", "latent"):
        return value
    if value.ndim == 5:  # videos: one entry for each
        videos = [_convert(frames, kind, to_host) for frames in value]
        return np.stack(videos) if kind == "np" else videos
    array = VaeImageProcessor.pt_to_numpy(value)
    return VaeImageProcessor.numpy_to_pil(array) if kind == "pil" else array


class Meter:
    """Counts what a request takes in and gives, in the tokens of its model."""

    def __init__(self, loaded: Loaded) -> None:
        # copies: fast tokenizers cannot be used by two threads at once
        tokenizer: Any = getattr(loaded.pipe, "tokenizer", None)
        self._here, self._there = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "carpool-usage")
        self._count_there = lru_cache(64)(self._count)  # the n outputs of a request share a prompt
        self._card = loaded.card

    def usage(self, job: CheckedRequest) -> "Future[tuple[int, int]]":
        """Text tokens of the prompt (uncut), and latent patches of the picture.

        There at once for a short prompt; a long one is counted on another thread.
        """
        prompt = job.arguments.get("prompt")
        text = prompt if isinstance(prompt, str) and self._here is not None else ""
        if len(text) > LONG_TEXT:
            return self._thread.submit(lambda: (self._count_there(text), self._patches(job)))
        done: Future[tuple[int, int]] = Future()
        done.set_result((len(self._here(text).input_ids) if text else 0, self._patches(job)))
        return done

    def _count(self, text: str) -> int:
        return len(self._there(text).input_ids)

    def _patches(self, job: CheckedRequest) -> int:
        width, height = (
            job.arguments.get(name) or default
            for name, default in zip(
                ("width", "height"), self._card.default_size_px or (0, 0), strict=True
            )
        )
        side_px = self._card.size_multiple_px
        return int((width // side_px) * (height // side_px))


def versions() -> dict[str, str]:
    """Of the libraries that a picture depends on."""
    return {name: metadata.version(name) for name in ("torch", "diffusers", "transformers")}


def describe(
    pipe: DiffusionPipeline,
    name: str,
    extra: Mapping[str, Any],
    settings: EngineSettings,
    tasks: tuple[Task, ...],
) -> Card:
    """What clients may know of a pipeline; `extra` is what its card file says."""
    defaults = extra.get("defaults", {})
    if isinstance(getattr(pipe, "scheduler", None), DMDScheduler):
        steps = len(pipe.scheduler.config.levels)
        defaults = {"num_inference_steps": steps, "guidance_scale": 1.0, **defaults}
    return Card(
        id=name,
        tasks=tasks,
        defaults=dict(defaults),
        size_multiple_px=_size_multiple(pipe),
        default_size_px=_default_size(pipe, defaults),
        max_pixels=min(settings.max_pixels, extra.get("max_pixels", settings.max_pixels)),
        max_steps=settings.max_steps,
        frame_step=_frame_step(pipe),
    )


def _source(model: str | Path) -> tuple[str, dict[str, Any]]:
    """Where `from_pretrained` finds the model, and what its card file says."""
    folder = EMBEDDED.get(str(model)) or Path(model).expanduser()
    if (folder / "model_index.json").is_file():
        card = folder / CARD_FILE
        extra = _card(card) if card.is_file() else {}
        lora = {name: folder / str(path) for name, path in extra.get("lora", {}).items()}
        extra = {"id": folder.resolve().name, **extra, "lora": lora}  # never a path to clients
        return str(folder), extra
    text = str(model)
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise LoadFailed(
            f"no model at {text!r}: give {' or '.join(map(repr, EMBEDDED))}, a hub id like "
            "'org/name', or a folder that holds a model_index.json"
        )
    return text, {}


def _card(file: Path) -> dict[str, Any]:
    """What a card file says.

    Raises:
        LoadFailed: it is none.
    """
    kinds = {"id": str, "defaults": dict, "max_pixels": int, "lora": dict}
    try:
        said = jsonfile.loads(jsonfile.read(file))
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{file} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise LoadFailed(f"{file} is a {type(said).__name__}: must be an object")
    for name, kind in kinds.items():
        if name in said and type(said[name]) is not kind:
            seen, rule = type(said[name]).__name__, kind.__name__
            raise LoadFailed(f"{file}: {name} is a {seen}: must be a {rule}")
    return said


def _refuse_what_breaks(pipe: DiffusionPipeline) -> None:
    if getattr(pipe, "_all_hooks", None):
        raise LoadFailed(
            "model CPU offload swaps modules under running requests: use group offload"
        )
    for name, module in pipe.components.items():
        if getattr(module, "is_cache_enabled", False):
            raise LoadFailed(f"{name} has a step cache, which mixes up requests: disable_cache()")
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise LoadFailed(
                f"{name} is compiled as a whole: use compile_repeated_blocks() instead"
            )
        if hasattr(module, "_hf_hook") and getattr(module._hf_hook, "offload", False):
            raise LoadFailed(f"{name} is offloaded sequentially: use group offload instead")


def _keep_vae_exact(pipe: DiffusionPipeline) -> None:
    """Hold a VAE that overflows in float16 in float32 for good.

    The pipeline would flip the shared module's type around each decode, under the feet of other
    requests. Inputs are cast on the way in (`casts` in specs.py).
    """
    vae = getattr(pipe, "vae", None)
    if (
        vae is not None
        and vae.dtype == torch.float16
        and getattr(vae.config, "force_upcast", False)
    ):
        vae.to(torch.float32)
        vae.register_to_config(force_upcast=False)


def _size_multiple(pipe: DiffusionPipeline) -> int:
    factor = 1
    for name in ("video_processor", "image_processor"):  # Wan's image_processor is CLIP's
        config = getattr(getattr(pipe, name, None), "config", None)
        factor = getattr(config, "vae_scale_factor", factor)
    if hasattr(pipe, "video_processor"):  # those of pictures count the denoiser's patches in
        factor *= _patch_px(pipe)
    return int(factor * getattr(pipe, "patch_size", 1))


def _patch_px(pipe: DiffusionPipeline) -> int:
    """Latent places along a side of one of the denoiser's patches."""
    for name in ("transformer", "transformer_2"):
        patch = getattr(getattr(getattr(pipe, name, None), "config", None), "patch_size", None)
        if patch is not None:
            return int(patch[-1] if isinstance(patch, (tuple, list)) else patch)
    return 1


def _frame_step(pipe: DiffusionPipeline) -> int:
    """Frames of a video that one latent stands for."""
    names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    found = (getattr(pipe, name, None) for name in names)
    return int(next((factor for factor in found if factor), 1))


def _default_size(pipe: DiffusionPipeline, defaults: Mapping[str, Any]) -> tuple[int, int] | None:
    if "width" in defaults and "height" in defaults:
        return defaults["width"], defaults["height"]
    sample, factor = (
        getattr(pipe, "default_sample_size", None),
        getattr(pipe, "vae_scale_factor", None),
    )
    if not isinstance(sample, int) or not isinstance(factor, int):
        return None
    return sample * factor, sample * factor


def log_as_others(*, bars: bool) -> None:
    """Have the libraries' log lines go where all go; with or without bars while they load."""
    for library in (diffusers_log, transformers_log):
        library.disable_default_handler()
        library.enable_propagation()
        if not bars:
            library.disable_progress_bar()
