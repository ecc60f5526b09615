"""Compare a module before and after a call, and two answers bit by bit."""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from carpool.engine.random_state import default_generators

_DEPTH = 3  # of lists and dicts in a module's attributes that are looked into
_SKIPPED = {"_modules", "_parameters", "_buffers"}


@dataclass(frozen=True, slots=True)
class ModuleSnapshot:
    """The state that a module and the random generators are in."""

    state: Mapping[str, Any]
    random: tuple[Any, ...]
    held: tuple[Any, ...]  # keeps what is compared by identity alive

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleSnapshot":
        state: dict[str, Any] = {}
        held: list[Any] = []
        for path, part in module.named_modules():
            normed = {h.name for h in part._forward_pre_hooks.values() if isinstance(h, WeightNorm)}
            for name, value in part.__dict__.items():
                if name not in _SKIPPED and name not in normed:  # made anew from the parameters
                    state[f"{path}.{name}".lstrip(".")] = _fingerprint(value, held, _DEPTH)
            for kind in (part._parameters, part._buffers):
                for name, value in kind.items():
                    if value is not None:
                        state[f"{path}.{name}".lstrip(".")] = _fingerprint(value, held, 0)
        devices = [generator.get_state() for generator in default_generators()]
        drawn = torch.get_rng_state(), devices, np.random.get_state(), random.getstate()
        return cls(state, drawn, (*held,))

    def differs(self, before: "ModuleSnapshot") -> str | None:
        """The first change since: "random", or the path of an attribute; None: nothing."""
        ours, theirs = self.random, before.random
        if (
            not torch.equal(ours[0], theirs[0])
            or not all(map(torch.equal, ours[1], theirs[1]))
            or not np.array_equal(ours[2][1], theirs[2][1])
            or ours[2][2] != theirs[2][2]
            or ours[3] != theirs[3]
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
        """Give the generators the state back that they had."""
        cpu, devices, arrays, python = self.random
        torch.set_rng_state(cpu)
        for generator, state in zip(default_generators(), devices, strict=True):
            generator.set_state(state)
        np.random.set_state(arrays)
        random.setstate(python)


def _fingerprint(value: Any, held: list[Any], depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        held.append(value)
        version = 0 if value.is_inference() else value._version
        return "tensor", id(value), value.data_ptr() if _has_data(value) else 0, version
    if depth and isinstance(value, Mapping):
        return {str(n): _fingerprint(v, held, depth - 1) for n, v in value.items()}
    if depth and isinstance(value, (list, tuple, set, frozenset)) and len(value) < 1000:
        return [_fingerprint(v, held, depth - 1) for v in value]
    held.append(value)
    own = getattr(value, "__dict__", None)
    if depth and own and not isinstance(value, (type, nn.Module)) and not callable(value):
        return id(value), {n: _fingerprint(v, held, depth - 1) for n, v in own.items()}
    return "object", id(value)


def _has_data(value: Tensor) -> bool:
    return value.layout is torch.strided and value.device.type != "meta"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in an answer or in arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(getattr(value, "parameters", None), Tensor):  # DiagonalGaussianDistribution
        yield value.parameters


def versions(arguments: Mapping[str, Any]) -> list[int]:
    """How often each tensor was changed in place."""
    return [0 if one.is_inference() else one._version for one in tensors_in(arguments)]


def storages(value: Any) -> set[int]:
    """Where tensors keep their values."""
    found = {one.untyped_storage().data_ptr() for one in tensors_in(value) if _has_data(one)}
    return found - {0}


def module_tensors(module: nn.Module) -> list[Any]:
    """Weights, buffers, and tensors in plain attributes."""
    found: list[Any] = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        found += [v for n, v in part.__dict__.items() if n not in _SKIPPED]
    return found


def shares_memory(answer: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether an answer lies where an input does."""
    return bool(storages(answer) & storages(arguments))


def difference(
    together: Sequence[Any], alone: Sequence[Any], unread: Collection[str] = ()
) -> str | None:
    """The first difference between answers of a fused forward and of the calls by themselves.

    Args:
        unread: fields that no caller reads, which a fused answer may lack.
    """
    for ours, theirs in zip(together, alone, strict=True):
        found = _unlike(_without(ours, unread), _without(theirs, unread), "the answer")
        if found is not None:
            return found
    return None


def _without(answer: Any, unread: Collection[str]) -> Any:
    if not unread or not isinstance(answer, Mapping):
        return answer
    return {name: entry for name, entry in answer.items() if name not in unread}


def _unlike(ours: Any, theirs: Any, where: str) -> str | None:
    if type(ours) is not type(theirs):
        return f"{where} is {type(ours).__name__}, and {type(theirs).__name__} alone"
    if isinstance(ours, Tensor):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.device != theirs.device:
            return f"{where} has shape {tuple(ours.shape)}, and {tuple(theirs.shape)} alone"
        if torch.equal(ours, theirs):
            return None
        same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
        if bool(same.all()):
            return None
        if not ours.is_floating_point():
            return f"{where} differs"
        most = float((ours - theirs).abs().nan_to_num(nan=torch.inf).max())
        return f"{where} differs by up to {most:.1e}"
    if isinstance(ours, Mapping):
        if ours.keys() != theirs.keys():
            return f"{where} has other fields than alone"
        pairs = [(name, ours[name], theirs[name]) for name in ours]
    elif isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{where} has {len(ours)} entries, and {len(theirs)} alone"
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(getattr(ours, "parameters", None), Tensor):
        return _unlike(ours.parameters, theirs.parameters, where)
    elif ours is None or isinstance(ours, (bool, int, float, str)):
        return None if ours == theirs else f"{where} is {ours!r}, and {theirs!r} alone"
    else:
        return f"{where} holds a {type(ours).__name__}, which cannot be split"
    found = (_unlike(a, b, f"{where}, {name}") for name, a, b in pairs)
    return next((one for one in found if one is not None), None)
