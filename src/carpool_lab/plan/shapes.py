"""Run a pipeline on shapes alone: its own code runs; its modules return zeros of the right shapes.

The modules are built from configs without weights (PyTorch's device `meta`). A module call runs
there, which yields the shapes of its answer and its cost: `Work`. The pipeline continues with
zeros. So the count includes everything that the pipeline does, in its order.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from carpool.engine.intercept import methods_of
from carpool.engine.model import sparse_wan
from carpool.engine.model.files import class_of, modules_of, reading
from carpool.engine.model.modular import call_plainly, silence, workflows
from carpool.engine.model.single_file import weights_of
from carpool.engine.nested import tensors_in
from carpool.errors import InvalidValue, LoadFailed
from carpool.models.source import INDEXES, find, index_of, is_single_file
from carpool_lab.plan.names import check_size, known, named, no_configs
from carpool_lab.plan.work import META, CallGroup, Work, work_of

MODULAR = INDEXES[1]


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A pipeline of modules without weights."""

    name: str
    model_id: str  # the argument of `carpool serve`
    pipe: Any
    modules: Mapping[str, nn.Module]
    call: Mapping[str, Any]  # default arguments
    sizes: tuple[str, ...]
    source: str
    counted: tuple[CallGroup, ...] = ()  # where its package need not be here

    def parameters(self) -> dict[str, int]:
        """Weights by component."""
        return {n: sum(p.numel() for p in m.parameters()) for n, m in self.modules.items()}


class Tokenizer:
    """A fake tokenizer: every text has the maximum number of tokens."""

    def __init__(self, length: int) -> None:
        self.model_max_length, self.pad_token_id = length, 0

    def __call__(self, text: Any, max_length: int | None = None, **_: Any) -> Any:
        count = 1 if isinstance(text, str) else len(text)
        length = min(max_length or self.model_max_length, self.model_max_length)
        ids = torch.ones(count, length, dtype=torch.int64)
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": ids.clone()})

    def apply_chat_template(self, _: Any, **options: Any) -> Any:
        return self("", options.get("max_length")) if options.get("tokenize", True) else ""

    def encode(self, text: str) -> list[int]:
        return [1] * (2 + len(text) // 4)  # approximation for English

    def tokenize(self, _: str) -> list[str]:
        return []

    def batch_decode(self, ids: Tensor) -> list[str]:
        return [""] * len(ids)


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> ModelShapes:
    """Build a pipeline from configs, without weights.

    Args:
        name: a planner model, its hub id, or a folder in diffusers layout.

    Raises:
        LoadFailed: the model is unknown, or its configs are unreadable.
    """
    models, name = known(), named(name)
    if name not in models:
        return _from_folder(name, dtype)
    data = models[name]
    if "counted" in data:
        return _counted(name, data)
    parts: dict[str, Any] = {}
    for component, (library, *config) in data["components"].items():
        if library == "tokenizer":
            parts[component] = Tokenizer(config[0])
        elif library == "value":
            parts[component] = config[0]
        else:
            parts[component] = part(config, dtype)
    pipe = getattr(diffusers, data["pipeline"])(**parts)
    return _model(name, pipe, {**data, "source": f"config.json files of {data['model_id']}"})


def _counted(name: str, data: Mapping[str, Any]) -> ModelShapes:
    """A model of another package: its weights and calls as they were counted with that."""
    counts, calls = data["counted"]["parameters"], []
    with META:
        modules = {n: nn.ParameterList([torch.empty(count)]) for n, count in counts.items()}
    for entry in data["counted"]["calls"]:
        products = Counter({(m, n, k): count for m, n, k, count in entry["work"]["products"]})
        work = Work(**{**entry["work"], "products": products})
        calls.append(CallGroup(**{**entry, "work": work}))
    source = f"config.yaml of {data['model_id']}, counted with its own package"
    about = data["model_id"], None, modules, data["call"], tuple(data["sizes"]), source
    return ModelShapes(name, *about, tuple(calls))


def part(config: list[Any], dtype: torch.dtype) -> Any:
    """Build a part of a pipeline from its class name and configuration, without weights."""
    cls = getattr(diffusers, config[0], None) or getattr(sparse_wan, config[0], None)
    if cls is None:
        cls = getattr(transformers, config[0])
        with META:
            return cls(cls.config_class(**config[1])).to(dtype)
    if not issubclass(cls, nn.Module):
        return cls(**config[1])
    with META:
        return cls(**config[1]).to(dtype)


def _from_folder(name: str, dtype: torch.dtype) -> ModelShapes:
    """Build a pipeline from a local folder's configs, tokenizers and schedulers."""
    if is_single_file(name):
        weights_of(name)  # raises if it is not a model
        rule = "name the folder or hub id of its pipeline, whose configs define its shapes"
        raise LoadFailed(f"{name!r} is a file of weights: {rule}")
    try:
        source, _ = find(name)
        if (index_of(Path(source)) or Path()).name == MODULAR:
            return _from_blocks(source, dtype)
        index = dict(diffusers.DiffusionPipeline.load_config(source, local_files_only=True))
    except (LoadFailed, OSError) as error:
        raise no_configs(name, error) from error
    cls = class_of("diffusers", str(index.get("_class_name")))
    if cls is None:
        raise LoadFailed(f"{name}: diffusers has no pipeline {index.get('_class_name')!r}")
    modules, takes = modules_of(index), signature(cls.__init__).parameters
    try:
        parts = {
            component: _read(source, component, entry, component in modules, dtype)
            for component, entry in index.items()
            if component in takes
        }
        pipe = cls(**parts)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise LoadFailed(f"the configs of {name!r} cannot be read: {error}") from error
    data = {"model_id": name, "call": {}, "sizes": ["default"], "source": source}
    return _model(Path(source).name, pipe, data)


def _from_blocks(source: str, dtype: torch.dtype) -> ModelShapes:
    """Build a modular pipeline from its components' configs, at the sources in its index."""
    with reading(f"the configs of {source!r}"):
        pipe = diffusers.ModularPipeline.from_pretrained(source, local_files_only=True)
        for name in pipe.pretrained_component_names:
            spec = pipe.get_component_spec(name)
            place, folder = spec.pretrained_model_name_or_path, spec.subfolder or None
            if place is None:
                continue
            is_module = isinstance(spec.type_hint, type) and issubclass(spec.type_hint, nn.Module)
            part = _module(spec.type_hint, place, folder, dtype) if is_module else spec.load()
            pipe.register_components(**{name: part})
    silence(pipe.blocks)
    data = {"model_id": source, "call": {}, "sizes": ["default"], "source": source}
    return _model(Path(source).name, pipe, data)


def _read(source: str, component: str, entry: Any, is_module: bool, dtype: torch.dtype) -> Any:
    """Build a part of a pipeline from its entry in the index; modules have no weights."""
    if not isinstance(entry, (list, tuple)):
        return entry  # a plain value
    if entry[0] is None:
        return None  # this model lacks the part
    cls = class_of(*map(str, entry))
    if cls is None:
        raise ValueError(f"{component} is a {entry[1]}, which neither library has")
    if not is_module:
        return cls.from_pretrained(source, subfolder=component)
    return _module(cls, source, component, dtype)


def _module(cls: Any, source: str, folder: str | None, dtype: torch.dtype) -> nn.Module:
    """Build a module from a folder's config, without weights."""
    where = {"subfolder": folder, "local_files_only": True}
    with META:
        if issubclass(cls, transformers.PreTrainedModel):
            where["subfolder"] = folder or ""
            module: nn.Module = cls(cls.config_class.from_pretrained(source, **where))
        else:
            module = cls.from_config(cls.load_config(source, **where))
        return module.to(dtype)


def _model(name: str, pipe: Any, data: Mapping[str, Any]) -> ModelShapes:
    if not is_of_blocks(pipe):
        pipe.set_progress_bar_config(disable=True)
    modules = {n: module for n, module in pipe.components.items() if isinstance(module, nn.Module)}
    for module in modules.values():
        module.eval().requires_grad_(False)
    sizes = tuple(data["sizes"])
    return ModelShapes(name, data["model_id"], pipe, modules, data["call"], sizes, data["source"])


class _OnHost(TorchFunctionMode):
    """Returns zeros when pipeline code reads values of modules, for example a VAE's means."""

    is_off = False  # true while a module runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_off:
            args, kwargs = _zeros((args, kwargs))
        return func(*args, **(kwargs or {}))


def stages(model: ModelShapes, size: str = "default") -> list[CallGroup]:
    """Calls of the modules for one request, grouped, in the order of their first call.

    Args:
        model: result of `build`; not changed.
        size: WIDTHxHEIGHT in pixels, or `default` for the model's own.

    Raises:
        InvalidValue: the size is invalid.
        LoadFailed: the pipeline cannot be run on shapes alone.
    """
    if model.counted:
        if size != "default":
            raise InvalidValue(f"size {size!r}: the shapes of {model.name} have none: leave it out")
        return list(model.counted)
    groups: dict[Any, tuple[CallGroup, Any]] = {}
    host = _OnHost()

    def stub(component: str, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)  # pipelines and libraries inspect its signature
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = list(tensors_in((args, kwargs)))
            key = component, method, tuple(tuple(tensor.shape) for tensor in tensors)
            if key not in groups:
                host.is_off = True
                answer, work = work_of(original, args, kwargs)
                host.is_off = False
                rows = tensors[0].shape[0] if tensors else 1
                groups[key] = CallGroup(component, method, rows, work), answer
            stage, answer = groups[key]
            stage.calls += 1
            return _zeros(answer)

        return call

    pipe, cls = model.pipe, type(model.pipe)
    arguments = {"prompt": "a plan", "output_type": "pt", **model.call, **_sized(pipe, size)}
    pins = {"_execution_device": torch.device("cpu"), "__module__": cls.__module__}
    replaced: list[tuple[nn.Module, str]] = []
    try:
        for component, module in model.modules.items():
            for method in methods_of(module):
                if method != "generate":
                    vars(module)[method] = stub(component, method, getattr(module, method))
                    replaced.append((module, method))
        vars(sys.modules[cls.__module__]).setdefault("ftfy", SimpleNamespace(fix_text=str))
        pipe.__class__ = type(cls.__name__, (cls,), pins)
        with host:
            call_plainly(pipe, arguments) if is_of_blocks(pipe) else pipe(**arguments)
    except Exception as error:  # a pipeline may raise anything on zeros
        message = f"{type(error).__name__}: {error}"
        raise LoadFailed(f"{model.name} cannot be run on shapes alone: {message}") from error
    finally:
        pipe.__class__ = cls
        for module, method in replaced:
            del vars(module)[method]
    return [stage for stage, _ in groups.values()]


def _sized(pipe: Any, size: str) -> dict[str, Any]:
    """Arguments of a pipeline for a size, with a picture if it needs one."""
    sides = () if size == "default" else check_size(size)
    arguments: dict[str, Any] = dict(zip(("width", "height"), sides, strict=False))
    if needs_picture(pipe):
        shape = 1, arguments.get("height", 512), arguments.get("width", 512), 3
        arguments["image"] = VaeImageProcessor.numpy_to_pil(np.full(shape, 0.5))[0]
    return arguments


def is_of_blocks(pipe: Any) -> bool:
    return isinstance(pipe, diffusers.ModularPipeline)


def needs_picture(pipe: Any) -> bool:
    if is_of_blocks(pipe):
        return all(any(i.name == "image" for i in task) for task in workflows(pipe).values())
    image = signature(pipe.__call__).parameters.get("image")
    return image is not None and image.default is Parameter.empty


def usual_steps(model: ModelShapes) -> int:
    """The model's default number of denoising steps."""
    if "num_inference_steps" in model.call:
        return int(model.call["num_inference_steps"])
    if is_of_blocks(model.pipe):
        inputs = {parameter.name: parameter.default for parameter in model.pipe.blocks.inputs}
        return int(inputs.get("num_inference_steps") or 1)
    return int(signature(model.pipe.__call__).parameters["num_inference_steps"].default)


def _zeros(answer: Any) -> Any:
    """Convert an answer on `meta` to zeros on the host, with almost no memory."""

    def zero(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        return torch.zeros((), dtype=value.dtype).expand(value.shape)

    return tree_map(zero, answer)
