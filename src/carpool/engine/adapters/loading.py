"""One load of an adapter's tensors by diffusers' own loader, into shadows of the modules."""

import copy
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carpool.engine.adapters.names import layer_of
from carpool.engine.adapters.parts import Part
from carpool.engine.adapters.shadow import copy_of
from carpool.engine.adapters.tensors import AdapterTensors
from carpool.request.lora import SUFFIX

INSIDE = "adapter"  # adapter name in the shadow: PEFT takes no dots
JOINED = {  # projections that diffusers fuses for a LoKr, and their layers
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}

_APPLIED = re.compile(r"(?!.*lora_(mid|E|embedding))(?!.*hada_).*(lora|lokr|alpha|dora)")
"""The ends of names of tensors that PEFT may apply to a layer."""


class Load:
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
        self.placed: set[str] = set()
        self.strays: set[str] = set()
        self._messages: list[str] = []
        self.warnings: list[str] = []
        self.parts: dict[tuple[str, str], Part] = {}

    def run(self, file: Path, *, is_second: bool) -> None:
        target = copy.copy(self._pipe)
        # diffusers removes group offloading from every module there, and adds it again
        names = {name for name, part in vars(target).items() if isinstance(part, nn.Module)}
        vars(target).update(dict.fromkeys(names))
        for name, module in self._modules.items():
            setattr(target, name, module)
        options: dict[str, Any] = {"load_into_transformer_2": True} if is_second else {}
        target.lora_state_dict = self._state_dict
        with _heard("diffusers", "transformers") as self._messages:
            is_as_in_file = self._tensors.is_as_in_file and self._tensors.config is None
            if is_as_in_file and file.suffix == SUFFIX:  # else diffusers would treat it as a pickle
                options |= {"weight_name": file.name}
                target.load_lora_weights(str(file.parent), adapter_name=INSIDE, **options)
            else:
                tensors = dict(self._tensors.tensors)
                target.load_lora_weights(tensors, adapter_name=INSIDE, **options)
        self.strays.update(*map(self._tensors.named_in, self._messages))
        self.strays |= self._tensors.changed_norms()

    def _state_dict(self, source: Any, **options: Any) -> Any:
        """The pipeline's own `lora_state_dict`, without the tensors that fit no layer."""
        answer = type(self._pipe).lora_state_dict(source, **options)
        state, *rest = answer if isinstance(answer, tuple) else (answer,)
        heard = len(self._messages)
        self.strays |= self._without_effect(state, options)
        del self._messages[heard:]
        fitting = {}
        for name, tensor in state.items():
            if _plain(layer_of(name)) in self._fitting:
                fitting[name] = tensor
                self.placed.add(layer_of(name))
                if not _APPLIED.match(name.removeprefix(layer_of(name))):
                    self.strays.add(name)  # diffusers drops it without a warning
            else:
                self.strays.add(layer_of(name))
        if isinstance(source, dict) and options.get("return_lora_metadata"):
            rest[-1] = self._metadata()
        return (fitting, *rest) if isinstance(answer, tuple) else fitting

    def _without_effect(self, state: Mapping[str, Any], options: Mapping[str, Any]) -> set[str]:
        """The layers of the file that its converter drops: without them, it reads the same.

        Layers whose names differ in numbers only are tried as one, on tensors without values.
        """
        options = {name: value for name, value in options.items() if name != "weight_name"}
        kinds: dict[str, dict[str, Any]] = {}
        for name, tensor in self._tensors.tensors.items():
            kinds.setdefault(_kind(layer_of(name)), {})[name] = tensor
        placed = {_kind(layer_of(name).partition(".")[2]) for name in state} - {""}
        doubtful = [
            tensors
            for kind, tensors in kinds.items()
            if not kind.endswith(tuple(placed)) and any(t.any() for t in tensors.values())
        ]

        def is_same(tensors: Mapping[str, Any], device: str) -> bool:
            blank = torch.ones((), device=device)  # many have no memory of their own
            rest = {
                name: tensor if tensor.numel() == 1 else blank.expand(tensor.shape)
                for name, tensor in self._tensors.tensors.items()
                if name not in tensors
            }
            answer = type(self._pipe).lora_state_dict(rest, **options)
            read = answer[0] if isinstance(answer, tuple) else answer
            return bool(read.keys() == state.keys())

        dropped: set[str] = set()
        for tensors in doubtful:
            for device in ("meta", "cpu"):  # the second where the converter reads values
                try:
                    if is_same(tensors, device):
                        dropped.update(map(layer_of, tensors))
                    break
                except Exception:  # it needs these tensors, or values
                    continue
        return dropped

    def _metadata(self) -> dict[str, Any] | None:
        """PEFT's settings, without those of other versions, which PEFT ignores, too."""
        from peft import LoraConfig

        metadata = self._tensors.metadata
        if metadata is None or self._tensors.config is None:
            return None if metadata is None else dict(metadata)
        names = {field.name for field in fields(LoraConfig)}
        return {name: v for name, v in metadata.items() if name.partition(".")[2] in names}

    def layers(self) -> Iterator[tuple[tuple[str, str], Any]]:
        """The layers that PEFT inserted, by component and path."""
        from peft.tuners.tuners_utils import BaseTunerLayer  # slow to import

        for component, module in self._modules.items():
            for path, layer in module.named_modules():
                if isinstance(layer, BaseTunerLayer):
                    yield (component, path), layer

    def check_complete(self) -> None:
        """Count layers without an extracted part as strays: diffusers would only warn."""
        have = {_path(f"{component}.{path}") for component, path in self.parts}
        have |= {joined for path in have for joined in _joined(path)}
        self.strays |= {n for n in self.placed if _path(n) not in have}
        lacking = self._lacking_magnitudes()
        if lacking:
            self.warnings.append(
                f"{lacking} layers are DoRA, of which {type(self._pipe).__name__} of diffusers "
                "applies only the LoRA part"
            )

    def _lacking_magnitudes(self) -> int:
        """The number of the file's layers whose magnitude was not loaded."""
        loaded = sum(
            part.magnitude is not None and not place[0].startswith("text_encoder")
            for place, part in self.parts.items()
        )
        return len(self._tensors.dora_layers()) - loaded


def _joined(path: str) -> Iterator[str]:
    """The fused projections that a layer starts."""
    owner, _, name = path.rpartition(".")
    return (f"{owner}.{joined}" for joined, singles in JOINED.items() if name == singles[0])


def _path(name: str) -> str:
    """The plain name of a layer without its component, which loaders name differently."""
    return _plain(name).partition(".")[2]


def _plain(name: str) -> str:
    """A layer's name in one form for all versions of the libraries."""
    name = name.replace(".text_model.", ".").replace(".processor.", ".").removesuffix("_lora")
    if name.startswith("text_encoder"):
        return re.sub(r"\.to_(q|k|v|out)$", r".\1_proj", name)
    return f"{name}.0" if name.endswith(".to_out") else name


def _kind(layer: str) -> str:
    """A layer's name without its numbers and separators."""
    return re.sub(r"[\W\d_]+", "", layer)


class _Warnings(logging.Filter):
    """Collects the warnings of one thread's loaders, instead of logging them."""

    def __init__(self, levels: Mapping[str, int]) -> None:
        super().__init__()
        self.messages, self._thread = list[str](), threading.get_ident()
        self._levels = levels  # levels by library, before the load

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return record.levelno >= self._levels.get(record.name.partition(".")[0], 0)
        if record.levelno >= logging.WARNING:
            self.messages.append(record.getMessage())
        return False


@contextmanager
def _heard(*names: str) -> Iterator[list[str]]:
    """Collect the warnings that libraries log on this thread: they concern the adapter."""
    loggers = [logging.getLogger(name) for name in names]
    collected = _Warnings(levels := {logger.name: logger.level for logger in loggers})
    handlers = [h for logger in (*loggers, logging.root) for h in logger.handlers]
    for logger in loggers:
        logger.setLevel(min(logger.level, logging.WARNING))
    for handler in handlers:
        handler.addFilter(collected)
    try:
        yield collected.messages
    finally:
        for handler in handlers:
            handler.removeFilter(collected)
        for logger in loggers:
            logger.setLevel(levels[logger.name])
