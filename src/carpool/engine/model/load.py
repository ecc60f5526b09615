"""Load a pipeline and make it ready to be served, in a way that can be undone.

The pipeline's code is never changed. `LoadedPipeline.undo` undoes what loading changes on modules.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from diffusers.utils import logging as diffusers_log
from torch import nn
from transformers.utils import logging as transformers_log

from carpool.config import EngineSettings
from carpool.engine.model.assembly import read
from carpool.engine.model.card import card_of
from carpool.engine.model.compiling import warm_up
from carpool.engine.model.device import Device
from carpool.engine.model.embeddings import add_embeddings
from carpool.engine.model.hooks import refuse_what_breaks
from carpool.engine.model.hunyuan3d import read_shapes
from carpool.engine.model.language_models import (
    read_language_model,
    refuse_parts,
    text_tasks_of,
)
from carpool.engine.model.modular import Pipeline
from carpool.engine.model.prepare import apply
from carpool.engine.model.quantize import quantized_components
from carpool.engine.model.rewriter import attach
from carpool.engine.model.tasks import tasks_of
from carpool.engine.model.upcast import hold
from carpool.engine.patches import CLASSES
from carpool.engine.weights.placement import is_asked_for, place
from carpool.engine.weights.streaming import Streamer
from carpool.errors import CarpoolError, LoadFailed, SettingRejected
from carpool.models.damage import damage_in
from carpool.models.published import in_parts, name_of, shapes_in
from carpool.models.pull import pull_shapes
from carpool.models.source import check_hub, find, holds_language_model
from carpool.request.card import Card
from carpool.request.enhancement import PLANS
from carpool.request.lora import parse_lora
from carpool.settings.peers.sglang_rules import Server

if TYPE_CHECKING:
    from carpool.engine.model.language_server import LanguageServer

log = logging.getLogger("carpool")


class GroupOfRanks(Protocol):
    """Processes that compute denoisers together: `engine.group.leader.Group`."""

    at_loss: Callable[[], object]

    def attach(self, adapters: Any) -> None: ...

    def statistics(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class LoadedPipeline:
    """A pipeline on its device, ready to be intercepted."""

    pipe: Pipeline
    card: Card
    device: Device
    originals: Mapping[str, Pipeline]  # by task
    undo: Callable[[], object]  # makes modules what they were before they were loaded
    shared: Mapping[int, Any]  # what views share, by id: modules, and those inside of them
    lora: Mapping[str, str | Path] = field(default_factory=dict)  # adapters to begin with, by name
    source: str = ""  # the model as it was asked for
    is_spread: bool = False  # over several devices
    classes: dict[int, type] = field(default_factory=dict)  # of views, by id of their pipeline
    streamer: Streamer | None = None  # of weights that are not on the device all the time
    group: GroupOfRanks | None = None  # of processes that compute denoisers together
    language: "LanguageServer | None" = None  # writes prompts, or plans

    @property
    def vae_scale_px(self) -> int:
        """Pixels along a side that one latent place stands for."""
        names = ("vae_scale_factor_spatial", "vae_scale_factor")
        factors = (getattr(self.pipe, name, None) for name in names)
        return int(next((factor for factor in factors if factor), 8))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules by name, those of pipelines inside of the pipeline, too."""
        return dict(_modules(self.pipe))

    @property
    def server(self) -> Server:
        """Facts that the rules of batching configs may ask for."""
        parts = (part for module in self.modules.values() for part in module.modules())
        is_hooked = any(hasattr(part, "_diffusers_hook") for part in parts)
        is_offloaded = is_hooked and self.group is None  # whose hooks split sequences
        return Server(self.source, self.device.memory_gib, is_offloaded)

    @property
    def parameters(self) -> int:
        """Weights in all modules."""
        modules = self.modules.values()
        return sum(weight.numel() for module in modules for weight in module.parameters())


def _modules(pipe: Pipeline) -> Iterator[tuple[str, nn.Module]]:
    visited: set[int] = set()
    inner = {name: part for name, part in vars(pipe).items() if isinstance(part, Pipeline)}
    attributes = {**pipe.components, **vars(pipe)}
    deeper = ((f"{name}.{n}", m) for name, part in inner.items() for n, m in _modules(part))
    for name, module in (*attributes.items(), *deeper):
        if isinstance(module, nn.Module) and id(module) not in visited:
            visited.add(id(module))
            yield name, module


LoadFunction = TypeVar("LoadFunction", bound=Callable[..., Any])


def says_what_does_not_fit(load: LoadFunction) -> LoadFunction:
    """Let running out of memory while loading be a `LoadFailed` that says what works instead."""

    @wraps(load)
    def loading(model: Any, settings: EngineSettings, **hooks: Any) -> Any:
        try:
            return load(model, settings, **hooks)
        except (torch.OutOfMemoryError, MemoryError, SettingRejected) as error:
            is_said = settings.memory is not None
            if isinstance(error, SettingRejected) and (is_said or error.param != "memory"):
                raise
            name = model if isinstance(model, (str, Path)) else type(model).__name__
            failed = LoadFailed(
                f"cannot load {name!s}: its weights do not fit the memory ({error}); a smaller "
                "dtype, quantize and memory, which streams what does not fit, need less"
            )
            failed.wants_memory = True
            raise failed from None  # its frames hold the weights

    return cast("LoadFunction", loading)


@says_what_does_not_fit
def load(
    model: str | Path | Pipeline,
    settings: EngineSettings,
    *,
    begin: Callable[[str, Mapping[str, type]], object] = lambda source, classes: None,
    prepared: Callable[[Mapping[str, nn.Module]], object] = lambda modules: None,
) -> LoadedPipeline:
    """Load a pipeline: an embedded one, a hub id, a folder, a file, or one that is there already.

    Only safetensors weights are read, and no code from the checkpoint is run.

    Args:
        begin: called with the source and the classes of all modules, before they are read.
        prepared: called with the modules when they are ready, before the warm-up.

    Raises:
        LoadFailed: it is not to be had, or cannot be served as it is.
        SettingRejected: the device does not exist.
    """
    extra: Mapping[str, Any] = {}
    words: Mapping[str, int] = {}  # of embeddings
    began_s = time.monotonic()
    if isinstance(model, Pipeline):
        at = None if is_asked_for(settings) else model._execution_device
        device = Device(settings, at=at)
        pipe, name = model, type(model).__name__
    else:
        device = Device(settings)
        plain, settings = in_parts(str(model), settings)
        source, shapes = plain, shapes_in(plain, settings.variant)
        shapes = shapes or pull_shapes(plain, settings.revision, settings.variant)
        if shapes is None:
            source, extra = find(plain)
        folder = shapes or Path(source)
        if shapes is None and not extra:  # a model of the hub
            folder = check_hub(source, settings.revision).parent
        name = name_of(str(model)) or str(extra.get("id", model))
        try:
            with CLASSES:  # of nn.Module, which an engine that starts meanwhile would patch, too
                if shapes is not None:
                    pipe = read_shapes(shapes, device.dtype)
                elif holds_language_model(folder):
                    refuse_parts(settings)
                    pipe = read_language_model(source, settings.revision, device.dtype)
                else:
                    pipe = read(source, settings, device, None, begin)
            if settings.embeddings is not None:
                words = add_embeddings(pipe, settings.embeddings)
        except RecursionError as error:
            if quantized := quantized_components(folder):  # sdnq 0.2.8 beside diffusers 0.42
                raise LoadFailed(f"cannot load {model!s}: {quantized}") from error
            raise _too_deep(model) from error
        except (CarpoolError, torch.OutOfMemoryError, MemoryError):
            raise  # the last two are told by `says_what_does_not_fit`
        except Exception as error:  # of libraries that read files and quantize, of any class
            log.debug("cannot load %s", model, exc_info=error)
            raise LoadFailed(f"cannot load {model!s}: {_cause(error, folder)}") from error
    read_s = time.monotonic()
    refuse_what_breaks(pipe)
    if not dict(_modules(pipe)):
        raise LoadFailed(f"{name} has no modules yet: call its load_components() first")
    with ExitStack() as undo:
        for module in dict(_modules(pipe)).values():
            undo.callback(_restore_modes, _modes(module))
            module.eval().requires_grad_(False)
        language = _language_server(pipe, settings, undo)
        rewriter = settings.rewriter or extra.get("rewriter")
        if rewriter is not None and not (language and language.writes_prompts):
            attach(pipe, str(rewriter), device.dtype, device.torch, undo)
        hold(pipe, undo)
        is_moved = not isinstance(model, Pipeline) or is_asked_for(settings)
        streamer = None
        if is_moved:
            streamer = place(dict(_modules(pipe)), device.torch, settings, device.memory_gib)
        if streamer is not None:
            undo.callback(streamer.remove)
        elif is_moved:
            pipe.to(device.torch)
        placed_s = time.monotonic()
        apply(dict(_modules(pipe)), settings, device, undo)
        if streamer is not None and settings.context_parallel > 1:
            raise LoadFailed(
                f"context_parallel={settings.context_parallel}: the model does not fit "
                f"{device.torch}, and ranks cannot stream weights: quantize, or place text "
                "encoders elsewhere"
            )
        prepared(dict(_modules(pipe)))
        try:
            tasks = tasks_of(pipe)
            writers = text_tasks_of(pipe)
        except RecursionError as error:  # a scheduler that cannot be copied
            raise _too_deep(model) from error
        warm_up(pipe, settings, device)
        log.info(
            "%s is loaded: reading took %.1f s, placing weights %.1f s, preparing %.1f s",
            name, read_s - began_s, placed_s - read_s, time.monotonic() - placed_s,
        )  # fmt: skip
        return LoadedPipeline(
            pipe,
            replace(
                card_of(pipe, name, extra, settings, tuple(task for task, _ in tasks.values())),
                embeddings=words,
                writers=tuple(task for task, _ in writers.values()),
            ),
            device,
            {name: view_of for name, (_, view_of) in (tasks | writers).items()},
            undo.pop_all().close,
            {id(part): part for _, module in _modules(pipe) for part in module.modules()},
            {**extra.get("lora", {}), **parse_lora(settings.lora)},
            source=name if isinstance(model, Pipeline) else str(model),
            is_spread=settings.place is not None,
            streamer=streamer,
            language=language,
        )


def _language_server(
    pipe: Pipeline, settings: EngineSettings, undo: ExitStack
) -> "LanguageServer | None":
    if settings.language_url is None:
        return None
    from carpool.engine.model.language_server import LanguageServer  # an HTTP client

    writes_prompts = not hasattr(pipe, PLANS)
    if settings.rewriter is not None and writes_prompts:
        raise SettingRejected("rewriter and language_url both write prompts: give one of them")
    server = LanguageServer(
        settings.language_url, settings.language_model, settings.language_timeout,
        writes_prompts=writes_prompts,
    )  # fmt: skip
    undo.callback(server.close)
    return server


ModuleModes = tuple[list[tuple[nn.Module, bool]], list[tuple[nn.Parameter, bool]]]


def _modes(module: nn.Module) -> ModuleModes:
    """Which parts of a module are training, and which parameters want gradients."""
    parts = [(part, part.training) for part in module.modules()]
    return parts, [(weight, weight.requires_grad) for weight in module.parameters()]


def _restore_modes(modes: ModuleModes) -> None:
    parts, weights = modes
    for part, is_training in parts:
        part.training = is_training
    for weight, wants_gradient in weights:
        weight.requires_grad_(wants_gradient)


def _cause(error: Exception, folder: Path) -> str:
    """Why a model cannot be loaded, in one line: its damaged file, or what a library says."""
    is_text = str(error) and not isinstance(error, LookupError)
    text = " ".join(str(error).split()) if is_text else f"{type(error).__name__}: {error}"
    if quantized := quantized_components(folder):
        return f"{quantized} ({text:.200})"
    damage = damage_in(folder)
    return text if damage is None else f"{damage} ({text:.200})"


def _too_deep(model: object) -> LoadFailed:
    return LoadFailed(f"cannot load {model!s:.200}: the lists or objects of a file nest too deep")


@cache
def versions() -> dict[str, str]:
    """Of the libraries that a picture depends on."""
    return {name: metadata.version(name) for name in ("torch", "diffusers", "transformers")}


def log_as_others(*, bars: bool) -> None:
    """Have the libraries' log lines go where all go; with or without bars while they load."""
    for library in (diffusers_log, transformers_log):
        library.disable_default_handler()
        library.enable_propagation()
        if not bars:
            library.disable_progress_bar()
    blocks = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")
    blocks.addFilter(_is_no_failure)


@contextmanager
def quiet_libraries(*, bars: bool) -> Iterator[None]:
    """Keep the libraries' remarks, and their bars, off a program's standard error for a while.

    A program that has chosen how much they say keeps that.
    """
    libraries = (diffusers_log, transformers_log)
    loud = [log for log in libraries if log.get_verbosity() == logging.WARNING]
    with_bars = [] if bars else [log for log in libraries if log.is_progress_bar_enabled()]
    for log in loud:
        log.set_verbosity_error()
    for log in with_bars:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in loud:
            log.set_verbosity_warning()
        for log in with_bars:
            log.enable_progress_bar()


def _is_no_failure(record: logging.LogRecord) -> bool:
    """Blocks log what they raise, with its traceback, at each level; a request's error tells it."""
    return not record.getMessage().startswith(("Error in block", "\nError in block"))
