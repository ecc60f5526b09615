"""Read adapter files the way diffusers does, without the pipeline that runs noticing.

Diffusers knows many file formats, and loads all of them by putting PEFT layers into the modules.
So that is done to *shadows*: copies of the modules whose weights are one number each, repeated
without memory. (On the meta device PEFT would leave what it loads there, too.) What PEFT put in is
taken out again as pairs of small layers, and checked against the real ones.
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
from safetensors import SafetensorError, safe_open
from torch import nn

from carpool.engine.streams import beside
from carpool.errors import LoraRejected
from carpool.request.lora import SUFFIX, adapter_file

LOADING = threading.Lock()
"""PEFT and diffusers patch `nn.Module` while they load without initializing: never two at once."""

_INSIDE = "adapter"  # the name in the shadow: PEFT takes no dots, and nobody else sees it
_OTHERS = {  # in the names of weights: what they are of, which is not plain LoRA
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "lokr_": "LoKr",
    "hada_": "LoHa",
    "oft_": "OFT",
    "ia3_": "IA3",
}
_UP = re.compile(r"(.+?)\.(?:lora_B|lora_up|lora(?:_linear_layer)?\.up)\.(?:\w+\.)?weight")


@dataclass(frozen=True, slots=True)
class Part:
    """An adapter's addition to one layer: `up(down(x)) * scaling`."""

    down: nn.Module  # a linear layer or convolution, to `rank` channels
    up: nn.Module
    scaling: float  # alpha / rank
    dtype: torch.dtype  # of the weights


class AdapterReader:
    """Weightless copies of the modules that adapters of this pipeline may touch."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self._pipe, self._device = pipe, device
        self._modules: dict[str, nn.Module] | None = None  # made for the first adapter

    def read(self, path: Path) -> dict[tuple[str, str], Part]:
        """The parts of the adapter in a file or folder, by component and path of their layer.

        Raises:
            LoraRejected: it is no LoRA for this pipeline, or not one that can be trusted.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer  # nobody else needs it

        file = adapter_file(path)
        _check_weights(file)
        pipe = type(self._pipe).__name__
        if not hasattr(self._pipe, "load_lora_weights"):
            raise LoraRejected(f"{pipe} takes no LoRA")
        with LOADING, _quiet("diffusers"), _quiet("transformers"):
            if self._modules is None:
                self._modules = {
                    name: _copied(module, is_weightless=True)
                    for name in self._pipe._lora_loadable_modules
                    if isinstance(module := getattr(self._pipe, name, None), nn.Module)
                }
            shadow, source = copy.copy(self._pipe), {"weight_name": file.name}
            modules = {name: _copied(module) for name, module in self._modules.items()}
            for name, module in modules.items():
                setattr(shadow, name, module)
            try:
                shadow.load_lora_weights(str(file.parent), adapter_name=_INSIDE, **source)
                found = shadow.lora_state_dict(str(file.parent), **source)
            except Exception as error:  # whatever the loaders of others make of a strange file
                raise LoraRejected(f"{pipe} cannot load {file.name}: {error}") from error
        parts = {
            (component, layer_path): self._part(component, layer_path, layer)
            for component, module in modules.items()
            for layer_path, layer in module.named_modules()
            if isinstance(layer, BaseTunerLayer)
        }
        _check_complete(parts, found[0] if isinstance(found, tuple) else found, pipe)
        return parts

    def _part(self, component: str, path: str, layer: Any) -> Part:
        """Take out what was put into one layer, and see that it fits the real one."""
        from peft.tuners.lora import LoraLayer

        where = f"{component}.{path}"
        if not isinstance(layer, LoraLayer) or layer.lora_variant or layer.lora_embedding_A:
            kind, rule = type(layer).__name__, "only plain LoRA is served, not of embeddings"
            raise LoraRejected(f"{where} has a {kind}: {rule}")
        down: Any = layer.lora_A[_INSIDE]
        up: Any = layer.lora_B[_INSIDE]
        real: Any = getattr(self._pipe, component).get_submodule(path)
        sizes = tuple(down.weight.shape[1:]), up.weight.shape[0]
        if sizes != _sizes(real):
            raise LoraRejected(
                f"the weights for {where} are for a layer of {_show(*sizes)}, this model's is of "
                f"{_show(*_sizes(real))}: the adapter is of another model"
            )
        weights = [*down.parameters(), *up.parameters()]
        if any(weight.is_meta for weight in weights):  # PEFT had nothing to put there
            raise LoraRejected(f"the weights for {where} are not complete")
        dtype = real.weight.dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:  # quantized
            dtype = torch.bfloat16
        with beside(self._device):  # the forward that runs
            for module in (down, up):
                module.requires_grad_(False).to(self._device, dtype)
            fits = all(bool(weight.isfinite().all()) for weight in weights)
        if not fits:
            raise LoraRejected(f"the weights for {where} do not fit into {dtype}")
        return Part(down, up, float(layer.scaling[_INSIDE]), dtype)


def _check_weights(file: Path) -> None:
    """Refuse what is no LoRA, another kind of adapter, or not a number."""
    try:
        with safe_open(file, "pt") as weights:
            names = list(weights.keys())
            for name in names:
                for mark, kind in _OTHERS.items():
                    if mark in name:
                        raise LoraRejected(f"{file.name} is a {kind}: only plain LoRA is served")
                if not weights.get_tensor(name).isfinite().all():
                    raise LoraRejected(f"{file.name} has NaN or infinite values in {name}")
    except (SafetensorError, OSError) as error:
        raise LoraRejected(f"{file.name} is not a readable {SUFFIX} file: {error}") from error
    if not any("lora" in name for name in names):
        raise LoraRejected(f"{file.name} holds no LoRA weights")


def _check_complete(
    parts: Mapping[tuple[str, str], Part], state: Mapping[str, Any], pipe: str
) -> None:
    """Refuse an adapter of which some layers found no place: diffusers would only warn."""
    wanted = {match[1] for name in state if (match := _UP.fullmatch(name))}
    have = {_plain(f"{component}.{path}") for component, path in parts}
    left = sorted(name for name in wanted if _plain(name) not in have)
    if left or not parts:
        some = f"{len(left)} of {len(wanted)} layers are" if left else "its layers are"
        example = f", such as {left[0]}" if left else ""
        raise LoraRejected(f"{some} not in this {pipe}{example}: the adapter is of another model")


def _plain(name: str) -> str:
    """A layer's name without what versions of the libraries put in or leave out."""
    return name.replace(".text_model.", ".").replace(".processor.", ".").removesuffix("_lora")


def _sizes(layer: Any) -> tuple[tuple[int, ...], int]:
    """Input and output sizes of a linear layer or convolution, with its kernel."""
    if hasattr(layer, "in_features"):  # quantized weights are packed, so not of this shape
        return (layer.in_features,), layer.out_features
    return tuple(layer.weight.shape[1:]), layer.weight.shape[0]


def _show(takes: tuple[int, ...], gives: int) -> str:
    return f"{'x'.join(map(str, takes))} to {gives}"


def _copied(module: nn.Module, *, is_weightless: bool = False) -> nn.Module:
    """A copy with the same weights, or with none to speak of, and without hooks of offloading."""
    memo: dict[int, Any] = {id(one): one for one in (*module.parameters(), *module.buffers())}
    if is_weightless:
        for one, weight in memo.copy().items():
            memo[one] = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            if isinstance(weight, nn.Parameter):
                memo[one] = nn.Parameter(memo[one], requires_grad=False)
    hooks = ("_diffusers_hook", "_hf_hook")  # they hold weights, and would put them back
    for part in module.modules():
        memo.update({id(vars(part)[name]): None for name in hooks if name in vars(part)})
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        for name in hooks:
            vars(part).pop(name, None)
    return copied


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Keep the library from warning of what is said here as an error, or is none."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)
