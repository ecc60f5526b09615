"""The tensors of an adapter's file, converted to a form that diffusers' loaders accept."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from carpool.engine.adapters.names import layer_of, readable
from carpool.engine.weights.sample import digest_of
from carpool.error_text import reason
from carpool.errors import LoraRejected
from carpool.request.lora import SUFFIX

_UP = re.compile(r"[._]lora(?:_linear_layer)?[._](?:up|B)\.(?:\w+\.)?weight$")
_SCALED = ("scale_weight", "weight_scale", "scaled_fp8", "scale_input")
_TEXTS = re.compile(r"(lora_te|text_encoder|conditioner\.|cond_stage_model\.|clip_[lg]\.|t5xxl)")
_KINDS = {  # marks in tensors' names
    "lokr_": "LoKr",
    "hada_": "LoHa",
    "oft_": "OFT",
    "ia3_": "IA3",
    "on_input": "IA3",
    "vera_": "VeRA",
    ".b2.weight": "GLoRA",
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
}
_OF_MODEL = (  # PEFT's settings that change more than the outputs of single layers
    "modules_to_save", "target_parameters", "layer_replication", "trainable_token_indices",
    "alora_invocation_tokens",
)  # fmt: skip
_OF_WEIGHTS = ("pissa", "olora", "loftq", "corda", "lora_ga")  # start by changing the weights
_OF_FIRST, _OF_SECOND = "transformer.", "transformer_2."  # prefixes of two experts


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """The tensors and settings in an adapter's file."""

    tensors: Mapping[str, Tensor]
    header: Mapping[str, str]  # the file's metadata
    config: Mapping[str, Any] | None = None  # PEFT's settings; names have the component's prefix
    is_as_in_file: bool = True
    digest: str = ""

    @property
    def kind(self) -> str:
        names = self.tensors
        kinds = (kind for mark, kind in _KINDS.items() if any(mark in name for name in names))
        return next(kinds, "LoRA" if any(map(_UP.search, names)) else "file without LoRA pairs")

    @property
    def layers(self) -> set[str]:
        return {layer_of(name) for name in self.tensors}

    def dora_layers(self) -> set[str]:
        marks = tuple(mark for mark, kind in _KINDS.items() if kind == "DoRA")
        return {layer_of(name) for name in self.tensors if any(mark in name for mark in marks)}

    def changed_norms(self) -> set[str]:
        """The changed norm layers of the file, which loaders skip without a warning."""
        changes = ((n, t) for n, t in self.tensors.items() if n.endswith((".diff", ".diff_b")))
        return {layer_of(name) for name, tensor in changes if "norm" in name and tensor.any()}

    def without(self, layers: Collection[str]) -> "AdapterTensors":
        tensors = {n: tensor for n, tensor in self.tensors.items() if layer_of(n) not in layers}
        return AdapterTensors(tensors, self.header, self.config, is_as_in_file=False)

    def text_layers(self) -> set[str]:
        """The layers of text encoders, by name."""
        return {layer for layer in self.layers if _TEXTS.match(layer)}

    def named_in(self, text: str) -> set[str]:
        """The layers with a tensor named in a loader's message, with or without its prefix."""
        words = set(re.findall(r"[\w.]+", text))
        tails = {name: name.partition(".")[2] for name in self.tensors if "." in layer_of(name)}
        named = (name for name in self.tensors if name in words or tails.get(name) in words)
        return {layer_of(name) for name in named}

    def of_expert(self, is_second: bool) -> "AdapterTensors | None":
        """The part for one of two experts, if the file's names distinguish them."""
        if not any(name.startswith(_OF_SECOND) for name in self.tensors):
            return None
        start = _OF_SECOND if is_second else _OF_FIRST

        def own(entries: Mapping[str, Any]) -> dict[str, Any]:
            named = [(name, entry) for name, entry in entries.items() if name.startswith(start)]
            return {_OF_FIRST + name.removeprefix(start): entry for name, entry in named}

        config = own(adapter_metadata(self.header) or {})
        return AdapterTensors(own(self.tensors), self.header, config or None, is_as_in_file=False)

    def with_component(self, component: str, paths: Collection[str]) -> "AdapterTensors":
        """Change the names to those that a denoiser's loader reads; `paths` are its layers'."""
        tensors = readable(self.tensors, component, paths)
        if tensors.keys() == self.tensors.keys():
            return self
        settings = (self.metadata or {}).items()  # without a prefix, if one module wrote the file
        config = {name if "." in name else f"{component}.{name}": v for name, v in settings}
        return AdapterTensors(tensors, self.header, config or None, is_as_in_file=False)

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """The adapter's metadata for diffusers' loaders."""
        return self.config if self.config is not None else adapter_metadata(self.header)


def adapter_metadata(header: Mapping[str, str]) -> dict[str, Any] | None:
    """PEFT's settings, as diffusers stores them in a file."""
    text = header.get("lora_adapter_metadata")
    return None if text is None else dict(json.loads(text))


def read_tensors(file: Path) -> AdapterTensors:
    """Read an adapter's file.

    Raises:
        LoraRejected: it cannot be read, holds no adapter, or has NaN or infinite values.
    """
    try:
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            if not any(re.search("lora|lokr|hada_|oft_|ia3_|vera_", name) for name in names):
                rule = "models and ControlNets are components, IP-adapters need code (--pipeline)"
                raise LoraRejected(f"{file.name} holds no LoRA weights: {rule}")
            tensors = {name: opened.get_tensor(name) for name in names}
            header = dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        why = f"is not a readable {SUFFIX} file: {reason(error)}"
        raise LoraRejected(f"{file.name} {why}") from error
    if scales := [name for name in tensors if name.endswith(_SCALED)]:
        what = f"scaled float8 weights ({scales[0]})"
        raise LoraRejected(f"{file.name} holds {what}: only plain ones are read")
    is_as_in_file = True
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            tensors[name], is_as_in_file = tensor.float(), False
        if not tensors[name].isfinite().all():
            raise LoraRejected(f"{file.name} has NaN or infinite values in {name}")
        if name.endswith("alpha") and tensor.numel() != 1:
            raise LoraRejected(f"{name} has {tensor.numel()} entries: must be one number")
        is_real = tensor.is_floating_point() and tensor.numel() > 0
        if _UP.search(name) and not (is_real and tensor.ndim > 1):
            shape = f"shape {list(tensor.shape)} of {tensor.dtype}"
            raise LoraRejected(f"{name} has {shape}: must be a matrix of real numbers")
    if turned := _without_negative_alphas(tensors):
        tensors, is_as_in_file = turned, False
    return AdapterTensors(tensors, header, _config(file, names), is_as_in_file, digest_of(file))


def _without_negative_alphas(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same adapter with negative alphas made positive; empty if it has none.

    Loaders that split an alpha over both matrices never end with a negative one.
    """
    negative = {layer_of(n): n for n, t in tensors.items() if n.endswith("alpha") and t.item() < 0}
    if not negative:
        return {}
    turned = dict(tensors)
    for name, tensor in tensors.items():
        if _UP.search(name) and (alpha := negative.pop(layer_of(name), None)) is not None:
            turned[name], turned[alpha] = -tensor, -tensors[alpha]
    if negative:
        raise LoraRejected(f"{min(negative.values())} is negative: must be 0 or more")
    return turned


def _config(file: Path, names: Iterable[str]) -> dict[str, Any] | None:
    """The settings that PEFT writes next to the weights; refused if they change the model."""
    place = file.with_name("adapter_config.json")
    if file.stem != "adapter_model" or not place.is_file():
        return None
    try:
        settings = dict(json.loads(place.read_text()))
        kind = settings.pop("peft_type", "LORA")
        for name in ("auto_mapping", "base_model_name_or_path", "task_type", "revision"):
            settings.pop(name, None)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        why = f"beside {file.name} cannot be read: {reason(error)}"
        raise LoraRejected(f"{place.name} {why}") from error
    if kind != "LORA":
        raise LoraRejected(f"{place.name} beside {file.name} says {kind}: only LORA is read")
    has_biases = any(name.endswith(".bias") and ".lora_" not in name for name in names)
    start = str(settings.get("init_lora_weights")).lower()
    changes = [name for name in _OF_MODEL if settings.get(name)]
    changes += ["bias"] if has_biases and settings.get("bias", "none") != "none" else []
    changes += ["init_lora_weights"] if start.startswith(_OF_WEIGHTS) else []
    if changes:
        setting = f"{changes[0]}={settings[changes[0]]!r}, which changes the model itself"
        rule = "train without it, or let PEFT load it in a --pipeline of yours"
        raise LoraRejected(f"{place.name} has {setting}, for all requests: {rule}")
    return dict(settings)


def shown(layers: Iterable[str], limit: int = 8) -> str:
    """The first few layer names, for a message."""
    names = sorted(layers)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
