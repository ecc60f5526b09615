"""Read adapter files the way diffusers does, without the pipeline that runs noticing.

Diffusers knows many file formats, and loads all of them by putting PEFT layers into the modules.
So that is done to weightless copies (`shadow.py`). What PEFT put in is taken out again as pairs of
small layers, and checked against the real ones. Layers that fit nowhere are left out and reported.
"""

import copy
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carpool.engine.adapters.parts import Part, part_of, sizes_of
from carpool.engine.adapters.shadow import copy_of, shadow
from carpool.engine.adapters.tensors import AdapterTensors, layer_of, read_tensors, shown
from carpool.engine.streams import beside
from carpool.error_text import reason
from carpool.errors import CarpoolError, LoraRejected
from carpool.request.adapter_names import expert_of, split_target
from carpool.request.lora import SUFFIX, adapter_file

LOADING = threading.Lock()
"""PEFT and diffusers patch `nn.Module` while they load without initializing: never two at once."""

_INSIDE = "adapter"  # the name in the shadow: PEFT takes no dots, and nobody else sees it
_EXPERTS = ("transformer", "transformer_2")  # for high noise, for low noise
_MOST_TEXT = 400  # of a loader's message: some list each tensor of a file
_JOINED = {  # projections that diffusers joins for a LoKr, and the layers that they are
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
_TRIES = 4  # each leaves out layers that a loader cannot place: more than one kind is rare

AdapterParts = dict[tuple[str, str], Part]
"""The parts of an adapter, by component and path of the layer."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an adapter's file says for this pipeline."""

    parts: AdapterParts
    target: str = ""  # the expert that it is for; empty: both, or there are none
    warnings: tuple[str, ...] = ()
    trainer_name: str = ""  # as the trainer wrote it into the file


class AdapterReader:
    """Weightless copies of the modules that adapters of this pipeline may touch."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self._pipe, self._device = pipe, device
        self._modules: dict[str, nn.Module] | None = None  # made for the first adapter
        self._fitting: dict[str, set[str]] = {}  # paths of layers that take adapters
        names = getattr(pipe, "_lora_loadable_modules", ())
        experts = tuple(n for n in _EXPERTS if n in names and getattr(pipe, n, None) is not None)
        self.experts = experts if len(experts) > 1 else ()

    def read(self, place: str | Path) -> Reading:
        """Read the adapter in a file or folder.

        Args:
            place: its path; with two experts, `@transformer_2` behind it names one.

        Raises:
            LoraRejected: it is no adapter for this pipeline, or not one that can be trusted.
        """
        path, target = split_target(str(place))
        try:
            return self._read(Path(path).expanduser(), target)
        except CarpoolError:
            raise
        except Exception as error:  # of a strange file: it is the file's failure, whatever it is
            what = f"{type(error).__name__}: {_cut(error)}"
            raise LoraRejected(f"{Path(path).name}: {what}") from error

    def _read(self, path: Path, target: str) -> Reading:
        file = adapter_file(path)
        pipe = type(self._pipe).__name__
        if not hasattr(self._pipe, "load_lora_weights"):
            raise LoraRejected(f"{pipe} takes no LoRA")
        tensors = read_tensors(file)
        with LOADING:
            self._prepare()
            if target and target not in (self.experts or self._modules or ()):
                known = ", ".join(self.experts or self._modules or ())
                raise LoraRejected(f"{pipe} has no {target!r}: adapters go to {known}")
            second = tensors.of_expert(is_second=True) if self.experts else None
            if second is not None:
                readings = self._of_both(file, tensors, second, target)
            else:
                target = self._expert(target, file)
                readings = [self._load(file, tensors, target)]
        parts = {place: part for reading in readings for place, part in reading.parts.items()}
        strays = {layer for reading in readings for layer in reading.strays}
        if not parts or len(strays) > len(parts):
            total = len(strays) + len(parts)
            some = f"{len(strays)} of {total} layers are" if strays else "its layers are"
            example = f", such as {shown(strays, 1)}" if strays else ""
            raise LoraRejected(
                f"{some} not in this {pipe}{example}: the adapter is of another model"
            )
        warnings = [text for reading in readings for text in reading.warnings]
        if strays:
            some = f"{len(strays)} of {len(strays) + len(parts)} layers"
            warnings.append(
                f"{some} find no place in this {pipe}, and are left out: {shown(strays)}"
            )
        name = tensors.header.get("ss_output_name", "")
        return Reading(parts, target, tuple(dict.fromkeys(warnings)), name)

    def _prepare(self) -> None:
        if self._modules is None:
            self._modules = {
                name: shadow(module)
                for name in self._pipe._lora_loadable_modules
                if isinstance(module := getattr(self._pipe, name, None), nn.Module)
            }
            takes = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
            self._fitting = {
                name: {path for path, layer in module.named_modules() if isinstance(layer, takes)}
                for name, module in self._modules.items()
            }

    def _expert(self, target: str, file: Path) -> str:
        """The expert that an adapter is for: as said, as its file is named, or the first."""
        if not self.experts or target:
            return target
        return self.experts[expert_of(file.with_suffix("").name) or 0]

    def _of_both(
        self, file: Path, tensors: AdapterTensors, second: AdapterTensors, target: str
    ) -> list["_Load"]:
        """Load a file that names both experts."""
        both = dict(zip(self.experts, (tensors.of_expert(is_second=False), second), strict=True))
        mine = {name: one for name, one in both.items() if one and one.tensors}
        if target:
            mine = {name: one for name, one in mine.items() if name == target}
        return [self._load(file, one, name) for name, one in mine.items()]

    def _load(self, file: Path, tensors: AdapterTensors, target: str) -> "_Load":
        assert self._modules is not None
        denoiser = target or next((n for n in ("transformer", "unet") if n in self._modules), "")
        own = "transformer" if target in _EXPERTS else denoiser  # the loaders' name for it
        if denoiser:
            tensors = tensors.with_component(own, self._fitting[denoiser])
        refused: set[str] = set()
        for _ in range(_TRIES):
            load = _Load(self._pipe, self._modules, self._fitting, {own: denoiser}, tensors)
            try:
                load.run(file, is_second=denoiser == _EXPERTS[1])
                break
            except Exception as error:  # whatever the loaders of others make of a strange file
                name = type(self._pipe).__name__
                what = f"{file.name}, which is a {tensors.kind}"
                rejected = LoraRejected(f"{name} cannot load {what}: {_cut(error)}")
                rejected.__cause__ = error
                if load.strays and not load.kept:
                    break  # nothing fits: that is reported below
                unplaced = tensors.named_in(str(error)) or tensors.text_layers()
                if not unplaced or unplaced >= tensors.layers:
                    raise rejected from error
                refused |= unplaced
                tensors = tensors.without(unplaced)
        else:
            raise rejected
        load.strays |= refused
        for (component, path), layer in load.layers():
            for real, span in self._real(component, path):
                load.parts[component, real] = self._part(component, real, layer, span)
        load.check_complete()
        return load

    def _real(self, component: str, path: str) -> Iterator[tuple[str, tuple[int, int] | None]]:
        """The model's own layers for one of the shadow, in which a loader may join projections."""
        owner, _, name = path.rpartition(".")
        model = getattr(self._pipe, component)
        if name not in _JOINED or hasattr(model.get_submodule(owner), name):
            yield path, None
            return
        begin = 0
        for single in _JOINED[name]:
            _, gives = sizes_of(model.get_submodule(f"{owner}.{single}"))
            yield f"{owner}.{single}", (begin, begin + gives)
            begin += gives

    def _part(self, component: str, path: str, layer: Any, span: tuple[int, int] | None) -> Part:
        """Take out what was put into one layer, and see that it fits the real one."""
        where = f"{component}.{path}"
        real = getattr(self._pipe, component).get_submodule(path)
        try:
            part = part_of(layer, _INSIDE, real, span)
        except LoraRejected as error:
            raise LoraRejected(f"{where}: {error}") from None
        weights: list[Tensor] = [*part.down.parameters(), *part.up.parameters()]
        weights += [] if part.magnitude is None else [part.magnitude]
        if any(weight.is_meta for weight in weights):  # PEFT had nothing to put there
            raise LoraRejected(f"the weights for {where} are not complete")
        with beside(self._device):  # the forward that runs
            for module in (part.down, part.up):
                for weight in module.parameters():
                    # a copy: on a CPU they are the mapped file, which may be written or cut short
                    weight.requires_grad_(False).data = weight.to(
                        self._device, part.dtype, copy=True
                    )
            magnitude = part.magnitude
            if magnitude is not None:
                magnitude = magnitude.to(self._device, part.dtype, copy=True)
            weights = [*part.down.parameters(), *part.up.parameters()]
            fits = all(bool(weight.isfinite().all()) for weight in weights)
        if not fits:
            raise LoraRejected(f"the weights for {where} do not fit into {part.dtype}")
        return Part(part.down, part.up, part.scaling, part.dtype, magnitude)

    def for_expert(self, parts: AdapterParts, expert: str) -> AdapterParts | None:
        """The same parts for one of the experts; None where its layers are others."""
        moved = {
            (expert if component in self.experts else component, path): part
            for (component, path), part in parts.items()
        }
        for component, path in moved:
            [source] = {c for c, p in parts if p == path and (c == component or c in self.experts)}
            model, other = getattr(self._pipe, component), getattr(self._pipe, source)
            try:
                if sizes_of(model.get_submodule(path)) != sizes_of(other.get_submodule(path)):
                    return None
            except AttributeError:
                return None
        return moved


class _Load:
    """One load of an adapter's tensors into shadows, by diffusers' own loader."""

    def __init__(
        self,
        pipe: Any,
        modules: Mapping[str, nn.Module],
        fitting: Mapping[str, set[str]],
        homes: Mapping[str, str],
        tensors: AdapterTensors,
    ) -> None:
        self._pipe, self._tensors = pipe, tensors
        self._modules = {name: copy_of(module) for name, module in modules.items()}
        self._fitting = {
            _plain(f"{name}.{path}")
            for name in modules
            for layer_path in fitting[homes.get(name, name)]
            for path in (layer_path, *_joined(layer_path))
        }
        self.kept: set[str] = set()
        self.strays: set[str] = set()
        self.warnings: list[str] = []
        self.parts: AdapterParts = {}

    def run(self, file: Path, *, is_second: bool) -> None:
        target = copy.copy(self._pipe)
        for name, module in self._modules.items():
            setattr(target, name, module)
        options: dict[str, Any] = {"load_into_transformer_2": True} if is_second else {}
        target.lora_state_dict = self._state_dict
        with _heard("diffusers", "transformers") as messages:
            is_as_in_file = self._tensors.is_as_in_file and self._tensors.config is None
            if is_as_in_file and file.suffix == SUFFIX:  # else diffusers takes it for a pickle
                options |= {"weight_name": file.name}
                target.load_lora_weights(str(file.parent), adapter_name=_INSIDE, **options)
            else:
                tensors = dict(self._tensors.tensors)
                target.load_lora_weights(tensors, adapter_name=_INSIDE, **options)
        for message in messages:
            self.strays |= self._tensors.named_in(message)
        self.strays |= self._tensors.changed_norms()

    def _state_dict(self, source: Any, **options: Any) -> Any:
        """As the pipeline's own `lora_state_dict`, less what fits no layer."""
        made = type(self._pipe).lora_state_dict(source, **options)
        state, *rest = made if isinstance(made, tuple) else (made,)
        kept = {}
        for name, tensor in state.items():
            if _plain(layer_of(name)) in self._fitting:
                kept[name] = tensor
                self.kept.add(layer_of(name))
            else:
                self.strays.add(layer_of(name))
        if isinstance(source, dict) and options.get("return_lora_metadata"):
            rest[-1] = self._tensors.metadata
        return (kept, *rest) if isinstance(made, tuple) else kept

    def layers(self) -> Iterator[tuple[tuple[str, str], Any]]:
        """The layers that PEFT put in, by component and path."""
        from peft.tuners.tuners_utils import BaseTunerLayer  # nobody else needs it

        for component, module in self._modules.items():
            for path, layer in module.named_modules():
                if isinstance(layer, BaseTunerLayer):
                    yield (component, path), layer

    def check_complete(self) -> None:
        """Count as strays the layers of which no part was made: diffusers would only warn."""
        have = {_path(f"{component}.{path}") for component, path in self.parts}
        have |= {joined for path in have for joined in _joined(path)}
        self.strays |= {n for n in self.kept if _path(n) not in have}
        lacking = self._lacking_magnitudes()
        if lacking:
            self.warnings.append(
                f"{lacking} layers are DoRA, of which {type(self._pipe).__name__} of diffusers "
                "applies only the LoRA part"
            )

    def _lacking_magnitudes(self) -> int:
        """How many layers of the file have a magnitude that was not loaded."""
        loaded = sum(
            part.magnitude is not None and not place[0].startswith("text_encoder")
            for place, part in self.parts.items()
        )
        return len(self._tensors.dora_layers()) - loaded


def _joined(path: str) -> Iterator[str]:
    """The projection into which a loader may join a layer."""
    owner, _, name = path.rpartition(".")
    return (f"{owner}.{joined}" for joined, singles in _JOINED.items() if name == singles[0])


def _cut(error: Exception) -> str:
    text = f"there is no {error}" if isinstance(error, KeyError) else reason(error)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _path(name: str) -> str:
    """The plain name of a layer without its component, which loaders may call otherwise."""
    return _plain(name).partition(".")[2]


def _plain(name: str) -> str:
    """A layer's name without what versions of the libraries put in, leave out or call otherwise."""
    name = name.replace(".text_model.", ".").replace(".processor.", ".").removesuffix("_lora")
    if name.startswith("text_encoder"):
        return re.sub(r"\.to_(q|k|v|out)$", r".\1_proj", name)
    return f"{name}.0" if name.endswith(".to_out") else name


class _Warnings(logging.Filter):
    """Keeps the warnings of one thread's loaders from the log, and collects them."""

    def __init__(self, levels: Mapping[str, int]) -> None:
        super().__init__()
        self.messages, self._thread = list[str](), threading.get_ident()
        self._levels = levels  # as they are otherwise, by library

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return record.levelno >= self._levels.get(record.name.partition(".")[0], 0)
        self.messages.append(record.getMessage())
        return False


@contextmanager
def _heard(*names: str) -> Iterator[list[str]]:
    """Collect the warnings of libraries on this thread: they are the adapter's, or are none."""
    loggers = [logging.getLogger(name) for name in names]
    levels = {logger.name: logger.level for logger in loggers}
    collected, handlers = _Warnings(levels), list[logging.Handler]()
    for logger in loggers:
        above: logging.Logger | None = logger
        while above is not None:
            handlers += above.handlers
            above = above.parent if above.propagate else None
        logger.setLevel(min(logger.level, logging.WARNING))
    handlers = list(dict.fromkeys(handlers))
    for handler in handlers:
        handler.addFilter(collected)
    try:
        yield collected.messages
    finally:
        for handler in handlers:
            handler.removeFilter(collected)
        for logger in loggers:
            logger.setLevel(levels[logger.name])
