"""Compare a module before and after a call, and two answers bit by bit."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from carpool.engine.nested import tensors_in
from carpool.engine.per_call import CACHES
from carpool.engine.random_state import default_generators

_DEPTH = 3  # depth of nested lists and dicts in a module's attributes
_SKIPPED = {"_modules", "_parameters", "_buffers"}


@dataclass(frozen=True, slots=True)
class ModuleSnapshot:
    """The state of a module and of the random generators."""

    state: Mapping[str, Any]
    random: tuple[Any, ...]
    references: tuple[Any, ...]  # keeps objects alive that are compared by identity

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleSnapshot":
        state: dict[str, Any] = {}
        references: list[Any] = []
        for path, part in module.named_modules():
            normed = {h.name for h in part._forward_pre_hooks.values() if isinstance(h, WeightNorm)}
            for name, value in part.__dict__.items():
                if name not in _SKIPPED and name not in normed:  # else derived from the parameters
                    state[f"{path}.{name}".lstrip(".")] = _fingerprint(value, references, _DEPTH)
            for kind in (part._parameters, part._buffers):
                for name, value in kind.items():
                    if value is not None:
                        state[f"{path}.{name}".lstrip(".")] = _fingerprint(value, references, 0)
        devices = [generator.get_state() for generator in default_generators()]
        random_states = torch.get_rng_state(), devices, np.random.get_state(), random.getstate()
        return cls(state, random_states, (*references,))

    def differs(self, before: "ModuleSnapshot") -> str | None:
        """The first change since `before`: "random", or the path of an attribute; None: none."""
        after_states, before_states = self.random, before.random
        if (
            not torch.equal(after_states[0], before_states[0])
            or not all(map(torch.equal, after_states[1], before_states[1]))
            or not np.array_equal(after_states[2][1], before_states[2][1])
            or after_states[2][2] != before_states[2][2]
            or after_states[3] != before_states[3]
        ):
            return "random"
        if self.state == before.state:
            return None
        return next(
            path
            for path in sorted({*self.state, *before.state})
            if self.state.get(path) != before.state.get(path)
        )

    def restore_random(self) -> None:
        """Restore the state of the generators."""
        cpu, devices, arrays, python = self.random
        torch.set_rng_state(cpu)
        for generator, state in zip(default_generators(), devices, strict=True):
            generator.set_state(state)
        np.random.set_state(arrays)
        random.setstate(python)


def _fingerprint(value: Any, references: list[Any], depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        references.append(value)
        version = 0 if value.is_inference() else value._version
        return "tensor", id(value), value.data_ptr() if _has_data(value) else 0, version
    if depth and isinstance(value, Mapping):
        return {str(n): _fingerprint(v, references, depth - 1) for n, v in value.items()}
    if depth and isinstance(value, (list, tuple, set, frozenset)) and len(value) < 1000:
        return [_fingerprint(v, references, depth - 1) for v in value]
    references.append(value)
    attributes = getattr(value, "__dict__", None)
    if depth and attributes and not isinstance(value, (type, nn.Module)) and not callable(value):
        return id(value), {n: _fingerprint(v, references, depth - 1) for n, v in attributes.items()}
    return "object", id(value)


def _has_data(value: Tensor) -> bool:
    return value.layout is torch.strided and value.device.type != "meta"


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """The version counter of each tensor."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def storages(value: Any) -> set[int]:
    """The storage addresses of the tensors."""
    addresses = {t.untyped_storage().data_ptr() for t in tensors_in(value) if _has_data(t)}
    return addresses - {0}


def module_tensors(module: nn.Module) -> list[Any]:
    """Weights, buffers, and tensors in plain attributes."""
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        tensors += [v for n, v in part.__dict__.items() if n not in _SKIPPED]
    return tensors


def shares_memory(answer: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether an answer shares storage with an input."""
    return bool(storages(answer) & storages(arguments))


def difference(
    together: Sequence[Any], alone: Sequence[Any], unread: Collection[str] = ()
) -> str | None:
    """The first difference between the answers of a fused forward and of lone calls.

    Args:
        unread: fields that no caller reads; a fused answer may lack them.
    """
    for fused, reference in zip(together, alone, strict=True):
        change = _unlike(_without(fused, unread), _without(reference, unread), "the answer")
        if change is not None:
            return change
    return None


def _without(answer: Any, unread: Collection[str]) -> Any:
    if not unread or not isinstance(answer, Mapping):
        return answer
    return {name: entry for name, entry in answer.items() if name not in unread}


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _unlike(fused: Any, reference: Any, where: str) -> str | None:
    if type(fused) is not type(reference):
        return f"{where} is {type(fused).__name__}, and {type(reference).__name__} alone"
    if isinstance(fused, Tensor):
        if _form(fused) != _form(reference):
            return f"{where} has shape {tuple(fused.shape)}, and {tuple(reference.shape)} alone"
        if torch.equal(fused, reference):
            return None
        equal = (fused == reference) | ((fused != fused) & (reference != reference))
        if bool(equal.all()):
            return None
        if not fused.is_floating_point():
            return f"{where} differs"
        deviation = float((fused - reference).abs().nan_to_num(nan=torch.inf).max())
        return f"{where} differs by up to {deviation:.1e}"
    if isinstance(fused, Mapping):
        if fused.keys() != reference.keys():
            return f"{where} has other fields than alone"
        pairs = [(name, fused[name], reference[name]) for name in fused]
    elif isinstance(fused, (list, tuple)):
        if len(fused) != len(reference):
            return f"{where} has {len(fused)} entries, and {len(reference)} alone"
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(fused, reference, strict=True))]
    elif isinstance(getattr(fused, "parameters", None), Tensor):
        return _unlike(fused.parameters, reference.parameters, where)
    elif fused is None or isinstance(fused, (bool, int, float, str)):
        return None if fused == reference else f"{where} is {fused!r}, and {reference!r} alone"
    elif type(fused).__name__ in CACHES:
        return _unlike(vars(fused), vars(reference), where)
    else:
        return f"{where} holds a {type(fused).__name__}, which cannot be split"
    changes = (_unlike(a, b, f"{where}, {name}") for name, a, b in pairs)
    return next((change for change in changes if change is not None), None)
