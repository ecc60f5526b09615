"""Weightless copies of a pipeline's modules, for loaders that modify the modules."""

import copy
from typing import Any

import torch
from torch import nn

from carpool.engine.adapters.parts import base_layer, sizes_of
from carpool.engine.flattened_encoders import ALIAS

_HOOKS = ("_diffusers_hook", "_hf_hook")  # they hold weights, and would restore them


def shadow(module: nn.Module) -> nn.Module:
    """Copy a module without its weights, quantization, offloading hooks and adapters.

    Each weight is one number, expanded without memory. (On the meta device PEFT would also leave
    the loaded weights there.)
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if is_weight else empty
    copied = _copied(module, memo)
    _remove_adapters(copied)
    for path, layer in [*copied.named_modules()]:
        if path and hasattr(layer, "in_features") and hasattr(layer, "weight"):
            [takes], gives = sizes_of(layer)
            if tuple(layer.weight.shape) != (gives, takes) or type(layer).__module__ not in _PLAIN:
                copied.set_submodule(path, _linear(takes, gives, has_bias=layer.bias is not None))
    return copied


def copy_of(module: nn.Module) -> nn.Module:
    """Copy a shadow: new modules that share its weights."""
    return _copied(module, {id(t): t for t in (*module.parameters(), *module.buffers())})


_PLAIN = ("torch.nn.modules.linear",)


def _linear(takes: int, gives: int, *, has_bias: bool) -> nn.Linear:
    layer = nn.Linear(takes, gives, bias=has_bias, device="meta")
    layer.weight = nn.Parameter(torch.zeros(()).expand(gives, takes), requires_grad=False)
    if has_bias:
        layer.bias = nn.Parameter(torch.zeros(()).expand(gives), requires_grad=False)
    return layer


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    for part in module.modules():
        memo.update({id(vars(part)[name]): None for name in _HOOKS if name in vars(part)})
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        for name in (*_HOOKS, ALIAS):
            vars(part).pop(name, None)
    return copied


def _remove_adapters(module: Any) -> None:
    """Remove the adapters that the user has loaded; keep the layers below them."""
    for path, layer in [*module.named_modules()]:
        if path and hasattr(layer, "get_base_layer"):
            module.set_submodule(path, base_layer(layer))
    if hasattr(module, "peft_config"):
        del module.peft_config
        module._hf_peft_config_loaded = False
