"""Load a pipeline and prepare it for serving, in a way that can be undone.

The pipeline's code is never changed. `LoadedPipeline.undo` reverts all changes to modules.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from carpool.config import EngineSettings
from carpool.engine.model.assembly import read
from carpool.engine.model.card import card_of
from carpool.engine.model.compiling import warm_up
from carpool.engine.model.device import Device
from carpool.engine.model.embeddings import add_embeddings
from carpool.engine.model.hooks import refuse_what_breaks
from carpool.engine.model.hunyuan3d import read_shapes
from carpool.engine.model.language_models import read_language_model, refuse_parts, text_tasks_of
from carpool.engine.model.loaded import LoadedPipeline, modules_of
from carpool.engine.model.modular import Pipeline
from carpool.engine.model.prepare import apply
from carpool.engine.model.quantize import quantized_components
from carpool.engine.model.rewriter import attach, build
from carpool.engine.model.tasks import tasks_of
from carpool.engine.model.upcast import hold
from carpool.engine.model.weight_file import moving_weights
from carpool.engine.patches import CLASSES
from carpool.engine.weights.groups import plain_weights
from carpool.engine.weights.mapped_files import MappedFiles
from carpool.engine.weights.placement import folder_of, is_asked_for, place
from carpool.engine.weights.streaming import Streamer
from carpool.errors import CarpoolError, LoadFailed, SettingRejected
from carpool.models.damage import damage_in
from carpool.models.published import in_parts, name_of, shapes_in
from carpool.models.pull import pull_shapes
from carpool.models.source import check_hub, find, holds_language_model, pipeline_of
from carpool.request.enhancement import PLANS
from carpool.request.lora import parse_lora

if TYPE_CHECKING:
    from carpool.engine.model.language_server import LanguageServer

log = logging.getLogger("carpool")
OnBegin = Callable[[str, Mapping[str, type]], object]


def load(
    model: str | Path | Pipeline,
    settings: EngineSettings,
    *,
    begin: OnBegin = lambda source, classes: None,
    prepared: Callable[[Mapping[str, nn.Module]], object] = lambda modules: None,
) -> LoadedPipeline:
    """Load a pipeline: an embedded one, a hub id, a folder, a file, or a pipeline object.

    Only safetensors weights are read, and no code from the checkpoint is run.

    Args:
        begin: called with the source and the classes of all modules, before they are read.
        prepared: called with the prepared modules, before the warm-up.

    Raises:
        LoadFailed: it cannot be found, read or served.
        SettingRejected: the device does not exist.
    """
    at = None
    if isinstance(model, Pipeline) and not is_asked_for(settings):
        at = model._execution_device  # keep the owner's device
    with _memory_explained(model, settings), ExitStack() as undo:
        began_s = time.monotonic()
        device = Device(settings, at=at)
        files = _read(model, settings, device, begin)
        read_s = time.monotonic()
        pipe, settings = files.pipe, files.settings
        refuse_what_breaks(pipe)
        if not callable(pipe):
            raise LoadFailed(f"{type(pipe).__name__} has no __call__: load a pipeline of one task")
        if not dict(modules_of(pipe)):
            raise LoadFailed(f"{files.name} has no modules yet: call its load_components() first")
        for module in dict(modules_of(pipe)).values():
            _evaluate(module, undo)
        language = _language(pipe, settings, undo)
        rewriter = settings.rewriter or files.extra.get("rewriter")
        if rewriter is not None and not (language and language.writes_prompts):
            attach(pipe, str(rewriter), device.dtype, device.torch, undo)
        hold(pipe, undo)
        streamer = _moved(pipe, settings, device, undo) if at is None else None
        build(pipe, undo)
        placed_s = time.monotonic()
        apply(dict(modules_of(pipe)), settings, device, undo)
        prepared(dict(modules_of(pipe)))
        try:
            tasks, writers = tasks_of(pipe), text_tasks_of(pipe)
        except RecursionError as error:  # a scheduler that cannot be copied
            raise _too_deep(model) from error
        warm_up(pipe, settings, device)
        mapped = MappedFiles()
        undo.callback(mapped.close)
        if streamer is None and not isinstance(model, Pipeline):
            for weight in (w for _, part in modules_of(pipe) for w in plain_weights(part)):
                mapped.place_of(weight)
        log.info(
            "%s is loaded: reading took %.1f s, placing weights %.1f s, preparing %.1f s",
            files.name, read_s - began_s, placed_s - read_s, time.monotonic() - placed_s,
        )  # fmt: skip
        card = card_of(pipe, files.name, files.extra, settings, tuple(t for t, _ in tasks.values()))
        return LoadedPipeline(
            pipe,
            replace(
                card,
                embeddings=files.embeddings,
                writers=tuple(task for task, _ in writers.values()),
            ),
            device,
            {name: view_of for name, (_, view_of) in (tasks | writers).items()},
            undo.pop_all().close,
            {id(part): part for _, module in modules_of(pipe) for part in module.modules()},
            {**files.extra.get("lora", {}), **parse_lora(settings.lora)},
            source=files.name if isinstance(model, Pipeline) else str(model),
            is_spread=settings.place is not None,
            streamer=streamer,
            language=language,
            files=mapped,
        )


@contextmanager
def _memory_explained(model: object, settings: EngineSettings) -> Iterator[None]:
    """Turn a lack of memory into a `LoadFailed` with alternatives."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, SettingRejected) as error:
        if isinstance(error, SettingRejected) and (settings.memory or error.param != "memory"):
            raise
        name = model if isinstance(model, (str, Path)) else type(model).__name__
        failed = LoadFailed(
            f"cannot load {name!s}: its weights do not fit the memory ({error}); a smaller "
            "dtype, quantize and memory, which streams what does not fit, need less"
        )
        failed.wants_memory = True
        raise failed from None  # its frames reference the weights


@dataclass(frozen=True, slots=True)
class _Files:
    """A pipeline as read from its files, in memory."""

    pipe: Pipeline
    name: str
    settings: EngineSettings  # including the settings of the model's parts
    extra: Mapping[str, Any] = field(default_factory=dict)  # card of an embedded model
    embeddings: Mapping[str, int] = field(default_factory=dict)  # number of vectors by word


def _read(model: str | Path, settings: EngineSettings, device: Device, begin: OnBegin) -> _Files:
    if isinstance(model, Pipeline):
        return _Files(model, type(model).__name__, settings)
    source, settings = in_parts(str(model), settings)
    extra: Mapping[str, Any] = {}
    shapes = shapes_in(source, settings.variant)
    shapes = shapes or pull_shapes(source, settings.revision, settings.variant)
    if shapes is None:
        source, extra = find(source)
    folder = shapes or Path(source)
    if shapes is None and not extra:  # a model on the hub
        folder = check_hub(source, settings.revision).parent
    name = name_of(str(model)) or str(extra.get("id", model))
    try:
        with CLASSES, ExitStack() as undo:  # an engine that starts meanwhile patches nn.Module
            if is_asked_for(settings) and settings.stream != "none":
                undo.enter_context(moving_weights(folder_of(settings)))
            if shapes is not None:
                pipe = read_shapes(shapes, device.dtype)
            elif holds_language_model(folder):
                refuse_parts(settings)
                pipe = read_language_model(source, settings.revision, device.dtype)
            else:
                pipe = read(source, settings, device, None, begin)
        _check_tokenizers(pipe)
        embeddings = add_embeddings(pipe, settings.embeddings) if settings.embeddings else {}
    except RecursionError as error:
        if quantized := quantized_components(folder):  # sdnq 0.2.8 with diffusers 0.42
            raise LoadFailed(f"cannot load {model!s}: {quantized}") from error
        raise _too_deep(model) from error
    except (CarpoolError, torch.OutOfMemoryError, MemoryError):
        raise  # the last two are explained by `_memory_explained`
    except Exception as error:  # readers and quantizers may raise anything
        log.debug("cannot load %s", model, exc_info=error)
        raise LoadFailed(f"cannot load {model!s}: {_cause(error, folder)}") from error
    return _Files(pipe, name, settings, extra, embeddings)


def _check_tokenizers(pipe: Pipeline) -> None:
    """Refuse a tokenizer of special tokens only: transformers makes it if the files are missing."""
    for name, part in getattr(pipe, "components", {}).items():
        tokenizer = getattr(part, "tokenizer", part)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            continue
        if len(tokenizer) - len(tokenizer.added_tokens_decoder) < 2:  # T5's has one more
            files = " or ".join(sorted(tokenizer.vocab_files_names.values()))
            raise LoadFailed(
                f"{name} has no vocabulary: download or copy its files again ({files})"
            )


def _moved(
    pipe: Pipeline, settings: EngineSettings, device: Device, undo: ExitStack
) -> Streamer | None:
    """Move the weights to the device, or stream those that do not fit."""
    streamer = place(dict(modules_of(pipe)), device.torch, settings, device.memory_gib)
    if streamer is None:
        pipe.to(device.torch)
        return None
    undo.callback(streamer.remove)
    if settings.context_parallel > 1:
        raise LoadFailed(
            f"context_parallel={settings.context_parallel}: the model does not fit "
            f"{device.torch}, and ranks cannot stream weights: quantize, or place text "
            "encoders elsewhere"
        )
    return streamer


def _language(pipe: Pipeline, settings: EngineSettings, undo: ExitStack) -> "LanguageServer | None":
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


def _evaluate(module: nn.Module, undo: ExitStack) -> None:
    """Put a module into evaluation mode, without gradients, until `undo`."""
    for part in module.modules():
        undo.callback(setattr, part, "training", part.training)
    for weight in module.parameters():
        undo.callback(weight.requires_grad_, weight.requires_grad)
    module.eval().requires_grad_(False)


def _cause(error: Exception, folder: Path) -> str:
    """The cause of a failed load in one line: a damaged file, or the library's message."""
    is_text = str(error) and not isinstance(error, LookupError)
    text = " ".join(str(error).split()) if is_text else f"{type(error).__name__}: {error}"
    if quantized := quantized_components(folder):
        return f"{quantized} ({text:.200})"
    if "trust_remote_code" in text:
        return (
            "its folder names a library that is not known here, or code of its own, which never "
            "runs: --pipeline takes a function"
        )
    if pipeline_of(str(folder)).startswith("Onnx"):
        return "it is an export to ONNX, which is not run: take the model's own .safetensors files"
    if "module diffusers has no attribute" in text:
        return f"{text} ({diffusers.__version__}): the model needs another version of diffusers"
    files = folder.glob("*/*.*.safetensors") if "no file named" in text else ()
    if variants := sorted({file.name.split(".")[-2].partition("-")[0] for file in files}):
        return f"its files are of a variant: say --variant {variants[0]} ({text:.200})"
    damage = damage_in(folder)
    return text if damage is None else f"{damage} ({text:.200})"


def _too_deep(model: object) -> LoadFailed:
    return LoadFailed(f"cannot load {model!s:.200}: the lists or objects of a file nest too deep")
