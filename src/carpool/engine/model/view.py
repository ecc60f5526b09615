"""A request's own copy of the pipeline: create it, call it, and convert its output.

Pipelines store the state of a call on themselves and on their helpers. A view shares only the heavy
modules: schedulers, guiders, image processors and nested pipelines are copied, so that no request
sees another one's state.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import ModularPipeline
from diffusers.configuration_utils import FrozenDict
from diffusers.image_processor import VaeImageProcessor
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.feature_extraction_utils import FeatureExtractionMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.processing_utils import ProcessorMixin

from carpool.engine.model.artifacts import SOUNDS, fields_of, rate_of
from carpool.engine.model.border import moved
from carpool.engine.model.dmd import DMDScheduler
from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.model.modular import Pipeline, run, silence
from carpool.engine.model.prompt_weights import embedded
from carpool.engine.model.rewriter import TellPrompt, instructed, noting, rewrite
from carpool.errors import InvalidValue
from carpool.request.card import Card, Task
from carpool.request.lora import ATTENTION
from carpool.types import CheckedRequest

if TYPE_CHECKING:
    from carpool.engine.model.language_server import LanguageServer

_IMMUTABLE = (bool, int, float, str, bytes, type, type(None), torch.dtype, torch.device)
_READERS = (PreTrainedTokenizerBase, ProcessorMixin, ImageProcessingMixin, FeatureExtractionMixin)
"""Large, and never modified except plain attributes such as `padding_side`."""


def view(loaded: LoadedPipeline, task: str) -> Any:
    """A request's own copy of the pipeline that does `task`."""
    device = loaded.device.torch if loaded.is_spread else None
    return _copied(loaded.originals[task], dict(loaded.shared), loaded.classes, device)


def _copied(
    pipe: Pipeline, memo: dict[int, Any], classes: dict[int, type], device: torch.device | None
) -> Any:
    """A pipeline with its helpers; modules stay shared.

    Args:
        memo: shared and already copied objects by id, as for `copy.deepcopy`.
        classes: classes of the copies, by id of the pipeline; filled here.
        device: default device of components; None: the pipeline's.
    """
    if id(pipe) in memo:
        return memo[id(pipe)]
    if id(pipe) not in classes:
        classes[id(pipe)] = _pinned(pipe, device)
    if isinstance(pipe, ModularPipeline):
        memo[id(pipe._components_manager)] = None  # it also references other pipelines' components
    view: Any = copy.copy(pipe)
    memo[id(pipe)] = view
    attributes = vars(view)
    for name, value in vars(pipe).items():
        if not isinstance(value, _IMMUTABLE):
            attributes[name] = _own(value, memo, classes, device)
    view.__class__ = classes[id(pipe)]
    # at its end a call would reset hooks of modules in use by others
    view.maybe_free_model_hooks = lambda: None
    if isinstance(pipe, ModularPipeline):
        silence(view._blocks)
    else:
        config = getattr(pipe, "_progress_bar_config", {})
        attributes["_progress_bar_config"] = {**config, "disable": True}
    return view


def _own(
    value: Any, memo: dict[int, Any], classes: dict[int, type], device: torch.device | None
) -> Any:
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, Pipeline):
        return _copied(value, memo, classes, device)
    if isinstance(value, _READERS):
        return _reader(value, memo)
    if isinstance(value, FrozenDict):
        return _config(value)
    config = getattr(value, "_internal_dict", None)
    if isinstance(config, FrozenDict) and id(config) not in memo:
        memo[id(config)] = _config(config)
    try:
        return copy.deepcopy(value, memo)
    except TypeError:  # not copyable: a lock, a file, ...
        return value


def _config(config: FrozenDict) -> FrozenDict:
    """Copy a configuration: despite its name, it can change. Its constructor is slow."""
    twin = FrozenDict.__new__(FrozenDict)
    for name, value in config.items():
        OrderedDict.__setitem__(twin, name, value)
    vars(twin).update(vars(config))
    return twin


def _reader(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) not in memo:
        reader = memo[id(value)] = copy.copy(value)
        for name, entry in vars(value).items():
            if isinstance(entry, _READERS):
                vars(reader)[name] = _reader(entry, memo)
            elif type(entry) in (dict, list, set):
                vars(reader)[name] = entry.copy()
    return memo[id(value)]


def _pinned(pipe: Pipeline, device: torch.device | None) -> type:
    """Subclass the pipeline's class with its device as a constant.

    Diffusers inspects every submodule to find the device, which costs each request milliseconds;
    while an engine runs, the device cannot change.
    """
    cls = type(pipe)
    pins = {"_execution_device": device or pipe._execution_device, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), pins)


@dataclass(frozen=True, slots=True)
class PipelineOutput:
    """The output of a pipeline."""

    output: Any
    convert_to: str | None  # the requested output type, if tensors were requested instead
    rate: int | None = None  # audio sampling rate, Hz
    revised_prompt: str | None = None  # prompt rewritten by a language model


def call(
    pipe: Any,
    request: CheckedRequest,
    card: Card,
    tell: TellPrompt,
    language: "LanguageServer | None" = None,
) -> PipelineOutput:
    """Run the pipeline for a request.

    Random numbers are drawn on the CPU: equal on any device. If the pipeline only converts its
    images to the requested type, it returns tensors here and `finish` converts them: creating PIL
    images on the engine's thread would wait for the device.

    Args:
        tell: called with the rewritten prompt.
        language: writes prompts, or plans, in place of the pipeline.
    """
    arguments, texts = dict(request.arguments), list[str]()
    arguments |= {n: copy.copy(arguments[n]) for n in ATTENTION if n in arguments}  # they add keys

    def note(text: str) -> None:
        texts.append(text)
        tell(text, is_whole=True)

    plans = nullcontext() if language is None else language.planning(pipe, request.seed)
    if request.enhance_prompt:
        prompt = arguments["prompt"]
        if language is not None and language.writes_prompts:
            arguments["prompt"] = language.rewrite(prompt, tell)
        else:
            arguments["prompt"] = rewrite(pipe, prompt, tell)
        note(arguments["prompt"])
    task, arguments = card.task(request.task), instructed(pipe, arguments)
    if request.prompt_weights:
        arguments = embedded(pipe, task, arguments)
    with noting(pipe, note, tell), plans:
        output = _called(pipe, request, task, arguments, note)
    return replace(output, revised_prompt=texts[-1]) if texts else output


def _called(
    pipe: Any, request: CheckedRequest, task: Task, arguments: dict[str, Any], note: Any
) -> PipelineOutput:
    if (device := pipe._execution_device).type != "cpu":
        arguments = {name: moved(value, device) for name, value in arguments.items()}
    if task.takes("generator"):
        arguments["generator"] = torch.Generator().manual_seed(request.seed)
        if isinstance(getattr(pipe, "scheduler", None), DMDScheduler):
            pipe.scheduler.generator = arguments["generator"]
    if request.output_type is not None and task.takes("output_type"):
        arguments.setdefault("output_type", request.output_type)
    for parameter in task.parameters:  # JSON has only lists
        if parameter.is_tuple and isinstance(value := arguments.get(parameter.name), list):
            arguments[parameter.name] = tuple(value)
    defaults = {parameter.name: parameter.default for parameter in task.parameters}
    kind = arguments.get("output_type", defaults.get("output_type"))
    if isinstance(pipe, ModularPipeline):
        return PipelineOutput(run(pipe, arguments, note), None, rate_of(pipe))
    choose = getattr(pipe, "get_timesteps", None)
    if choose is not None and task.takes("strength") and arguments.get("denoising_start") is None:
        pipe.get_timesteps = partial(_some, choose)
    is_pasted = arguments.get("padding_mask_crop") is not None  # into a PIL image
    if task.only_converts and kind in ("pil", "np") and not is_pasted:
        arguments["output_type"] = "pt"
        return PipelineOutput(pipe(**arguments), str(kind), rate_of(pipe))
    return PipelineOutput(pipe(**arguments), None, rate_of(pipe))


def _some(choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The steps that remain at a strength, chosen by the pipeline.

    Raises:
        InvalidValue: no steps remain, on which schedulers fail with obscure errors.
    """
    answer = choose(*args, **kwargs)
    steps = answer[0] if isinstance(answer, tuple) else None
    if isinstance(steps, torch.Tensor) and steps.numel() == 0:
        raise InvalidValue(
            "strength leaves none of the steps: must be higher, or num_inference_steps must be",
            param="strength",
        )
    return answer


ToHost = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
"""Copies a tensor from the device, after a conversion there; may wait for it."""


def finish(answer: PipelineOutput, to_host: ToHost) -> dict[str, Any]:
    """The fields of a pipeline's output, on the host, in the requested type.

    Args:
        answer: result of `call`; tensors to convert are `images` (1, C, H, W) or a list of
            (layers, C, H, W), or `frames` (1, F, C, H, W), values 0-1; for their other names see
            `fields_of`. Other fields, such as audio, are unchanged; the audio's rate is added.
        to_host: copies from the output's device.
    """
    output = answer.output
    fields = fields_of(output) if isinstance(output, Mapping) else {"images": output}
    if answer.rate is not None and any(fields.get(name) is not None for name in SOUNDS):
        fields.setdefault("sampling_rate", answer.rate)
    return {
        name: _convert(value, answer.convert_to if name in ("images", "frames") else None, to_host)
        for name, value in fields.items()
    }


def _convert(value: Any, kind: str | None, to_host: ToHost) -> Any:
    if isinstance(value, (list, tuple)):
        return [_convert(entry, kind, to_host) for entry in value]
    if not isinstance(value, torch.Tensor):
        return value
    # values 0-1 become bytes, rounded as in diffusers
    value = to_host(value, lambda v: (v.float() * 255).round().byte() if kind == "pil" else v)
    if kind is None:
        return value
    if value.ndim == 5:  # one entry per video
        videos = [_pictures(frames, kind) for frames in value]
        return np.stack(videos) if kind == "np" else videos
    return _pictures(value, kind)


def _pictures(value: torch.Tensor, kind: str) -> Any:
    """Images (N, C, H, W) on the host as `np`, values 0-1, or as `pil`, from bytes."""
    if kind == "np":
        return VaeImageProcessor.pt_to_numpy(value)
    return VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(value) / 255)
