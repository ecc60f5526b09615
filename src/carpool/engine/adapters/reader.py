"""Read adapter files the way diffusers does, without a change to the running pipeline.

Diffusers knows many file formats, and loads all of them by inserting PEFT layers into the modules.
So adapters are loaded into weightless copies (`shadow.py`). The layers that PEFT inserted are
extracted as pairs of small layers, and checked against the real ones. Layers that match none are
left out and reported.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carpool.engine.adapters.loading import INSIDE, JOINED, Load
from carpool.engine.adapters.parts import Part, part_of, sizes_of
from carpool.engine.adapters.shadow import shadow
from carpool.engine.adapters.tensors import AdapterTensors, read_tensors, shown
from carpool.engine.streams import beside
from carpool.error_text import reason
from carpool.errors import CarpoolError, LoraRejected
from carpool.request.adapter_names import expert_of, split_target
from carpool.request.lora import STANDARD, adapter_file

LOADING = threading.Lock()
"""PEFT and diffusers patch `nn.Module` while they load without initializing: never two at once."""

_EXPERTS = ("transformer", "transformer_2")  # high and low noise
_MOST_TEXT = 400  # characters of a loader's message: some messages list each tensor of a file
_TRIES = 4  # each leaves out one kind of unplaceable layers; several kinds are rare

AdapterParts = dict[tuple[str, str], Part]
"""The parts of an adapter, by component and path of the layer."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of an adapter's file, read for this pipeline."""

    parts: AdapterParts
    target: str = ""  # the trained expert; empty: both halves, or the model has no experts
    warnings: tuple[str, ...] = ()
    trainer_name: str = ""  # the trainer's name for it, stored in the file
    digest: str = ""  # the file's


class AdapterReader:
    """Weightless copies of the modules that adapters of this pipeline may touch."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self._pipe, self._device = pipe, device
        self._modules: dict[str, nn.Module] | None = None  # created for the first adapter
        self._fitting: dict[str, set[str]] = {}  # paths of layers that accept adapters
        names = getattr(pipe, "_lora_loadable_modules", ())
        experts = tuple(n for n in _EXPERTS if n in names and getattr(pipe, n, None) is not None)
        self.experts = experts if len(experts) > 1 else ()

    def read(self, place: str | Path, names: Sequence[str] = ()) -> Reading:
        """Read the adapter in a file or folder; its names may reveal its expert.

        Raises:
            LoraRejected: it is no adapter for this pipeline, or an unsafe file.
        """
        path, target = split_target(str(place))
        try:
            return self._read(Path(path).expanduser(), target, names)
        except CarpoolError:
            raise
        except Exception as error:  # a loader may raise anything for an unusual file
            cause = f"{type(error).__name__}: {_cut(error)}"
            raise LoraRejected(f"{Path(path).name}: {cause}") from error

    def _read(self, path: Path, target: str, names: Sequence[str]) -> Reading:
        file = adapter_file(path)
        pipe = type(self._pipe).__name__
        if not hasattr(self._pipe, "load_lora_weights"):
            raise LoraRejected(f"{pipe} takes no LoRA")
        tensors = read_tensors(file)
        trainer_name = tensors.header.get("ss_output_name", "")
        with LOADING:
            self._prepare()
            if target and target not in (self.experts or self._modules or ()):
                experts = ", ".join(self.experts or self._modules or ())
                raise LoraRejected(f"{pipe} has no {target!r}: adapters go to {experts}")
            second = tensors.of_expert(is_second=True) if self.experts else None
            if second is not None:
                loads = self._of_experts(file, tensors, second, target)
                readings = list(loads.values())
                target = target or (next(iter(loads)) if len(loads) == 1 else "")
            else:
                file_name = file.parent.name if file.stem in STANDARD else file.with_suffix("").name
                target = self._expert(target, (file_name, *names, trainer_name))
                readings = [self._load(file, tensors, target)]
        parts = {place: part for reading in readings for place, part in reading.parts.items()}
        strays = {layer for reading in readings for layer in reading.strays}
        if not parts or len(strays) > len(parts):
            total = len(strays) + len(parts)
            share = f"{len(strays)} of {total} layers are" if strays else "its layers are"
            example = f", such as {shown(strays, 1)}" if strays else ""
            raise LoraRejected(
                f"{share} not in this {pipe}{example}: the {tensors.kind} is of another model, "
                "or has names that diffusers does not read: save a LoRA with diffusers' or kohya's"
            )
        warnings = [text for reading in readings for text in reading.warnings]
        if strays:
            share = f"{len(strays)} of {len(strays) + len(parts)} layers"
            warnings.append(
                f"{share} find no place in this {pipe}, and are left out: {shown(strays)}"
            )
        return Reading(parts, target, tuple(dict.fromkeys(warnings)), trainer_name, tensors.digest)

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

    def _expert(self, target: str, names: Sequence[str]) -> str:
        """The expert of an adapter: the target, else one from its names, else the first."""
        if not self.experts or target:
            return target
        parts = (part for name in names for part in reversed(name.split("/")))
        experts = (expert for part in parts if (expert := expert_of(part)) is not None)
        return self.experts[next(experts, 0)]

    def _of_experts(
        self, file: Path, tensors: AdapterTensors, second: AdapterTensors, target: str
    ) -> dict[str, Load]:
        """Load a file whose tensors name their experts."""
        halves = tensors.of_expert(is_second=False), second
        present = {
            name: part
            for name, part in zip(self.experts, halves, strict=True)
            if part and part.tensors
        }
        if target:
            present = {name: part for name, part in present.items() if name == target}
        return {name: self._load(file, part, name) for name, part in present.items()}

    def _load(self, file: Path, tensors: AdapterTensors, target: str) -> Load:
        assert self._modules is not None
        denoiser = target or next((n for n in ("transformer", "unet") if n in self._modules), "")
        loader_name = "transformer" if target in _EXPERTS else denoiser  # the loaders' name for it
        if denoiser:
            tensors = tensors.with_component(loader_name, self._fitting[denoiser])
        refused = {layer for layer in tensors.layers if layer.startswith("bundle_emb.")}
        tensors = tensors.without(refused) if refused else tensors
        for _ in range(_TRIES):
            load = Load(self._pipe, self._modules, self._fitting, {loader_name: denoiser}, tensors)
            try:
                load.run(file, is_second=denoiser == _EXPERTS[1])
                break
            except Exception as error:  # diffusers' loaders may raise anything for an unusual file
                name = type(self._pipe).__name__
                is_pair = tensors.kind in ("LoRA", "DoRA")
                hint = "of another model?" if is_pair else "diffusers cannot: convert it to a LoRA"
                described = f"{file.name}, which is a {tensors.kind} ({hint})"
                rejected = LoraRejected(f"{name} cannot load {described}: {_cut(error)}")
                rejected.__cause__ = error
                if load.strays and not load.placed:
                    break  # reported by the caller: no layer fits
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
        """The model's layers for one of the shadow; a loader may have fused projections."""
        owner, _, name = path.rpartition(".")
        model = getattr(self._pipe, component)
        if name not in JOINED or hasattr(model.get_submodule(owner), name):
            yield path, None
            return
        begin = 0
        for single in JOINED[name]:
            _, gives = sizes_of(model.get_submodule(f"{owner}.{single}"))
            yield f"{owner}.{single}", (begin, begin + gives)
            begin += gives

    def _part(self, component: str, path: str, layer: Any, span: tuple[int, int] | None) -> Part:
        """Extract the part of one layer, and check that it fits the real layer."""
        where = f"{component}.{path}"
        real = getattr(self._pipe, component).get_submodule(path)
        try:
            part = part_of(layer, INSIDE, real, span)
        except LoraRejected as error:
            raise LoraRejected(f"{where}: {error}") from None
        weights = [*part.down.parameters(), *part.up.parameters()]
        magnitude = part.magnitude
        if any(w.is_meta for w in (*weights, magnitude) if w is not None):  # PEFT found no weights
            raise LoraRejected(f"the weights for {where} are not complete")
        with beside(self._device):  # does not wait for the running forward
            for weight in weights:
                # copied: on a CPU they map the file, which may be written or truncated
                weight.requires_grad_(False).data = weight.to(self._device, part.dtype, copy=True)
            if magnitude is not None:
                magnitude = magnitude.to(self._device, part.dtype, copy=True)
            fits = all(bool(weight.isfinite().all()) for weight in weights)
        if not fits:
            raise LoraRejected(f"the weights for {where} do not fit into {part.dtype}")
        return Part(part.down, part.up, part.scaling, part.dtype, magnitude)

    def for_expert(self, parts: AdapterParts, expert: str) -> AdapterParts | None:
        """The same parts for one of the experts; None if its layers differ."""
        experts = self.experts
        moved = {(expert if c in experts else c, path): part for (c, path), part in parts.items()}
        for component, path in moved:
            [source] = {c for c, p in parts if p == path and (c == component or c in self.experts)}
            model, twin = getattr(self._pipe, component), getattr(self._pipe, source)
            try:
                if sizes_of(model.get_submodule(path)) != sizes_of(twin.get_submodule(path)):
                    return None
            except AttributeError:
                return None
        return moved


def _cut(error: Exception) -> str:
    text = f"there is no {error}" if isinstance(error, KeyError) else reason(error)
    text = " ".join(text.split()) or type(error).__name__
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
