"""Convert an adapter's layers to plain values and tensors, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from carpool.engine.adapters.parts import Kronecker, Part
from carpool.errors import PipelineFailed

_SHAPED = ("kernel_size", "stride", "padding", "dilation", "groups")
_CLASSES = {cls.__name__: cls for cls in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)}
_WEIGHT_ONLY = {cls.__name__: cls for cls in (nn.Identity, Kronecker)}  # no settings


def packed(parts: Mapping[tuple[str, str], Part], component: str) -> tuple[list[Any], list[Tensor]]:
    """The layers of an adapter for one component, as plain values and tensors.

    Returns:
        Path, scaling, dtype, whether there is a magnitude, and the two layers of each part,
        without weights; and the weights.

    Raises:
        PipelineFailed: a layer cannot be sent.
    """
    layers, weights = [], list[Tensor]()
    for (owner, path), part in parts.items():
        if owner != component:
            continue
        pair = []
        for layer in (part.down, part.up):
            if type(layer).__name__ not in _CLASSES | _WEIGHT_ONLY:
                raise PipelineFailed(
                    f"an adapter has a {type(layer).__name__} for {component}.{path}, which cannot "
                    "be sent to the other ranks of context_parallel"
                )
            pair.append(_layer(layer))
            weights += [weight.detach() for weight in layer.parameters()]
        weights += [] if part.magnitude is None else [part.magnitude]
        dtype = str(part.dtype).removeprefix("torch.")
        layers.append([path, part.scaling, dtype, part.magnitude is not None, *pair])
    return layers, weights


def _layer(layer: Any) -> list[Any]:
    if (name := type(layer).__name__) in _WEIGHT_ONLY:
        return [name, list(getattr(layer, "span", None) or ()), {}]
    is_linear = isinstance(layer, nn.Linear)
    sizes = "in_features out_features" if is_linear else "in_channels out_channels"
    arguments = [getattr(layer, name) for name in sizes.split()]
    shape = {} if is_linear else {name: getattr(layer, name) for name in _SHAPED}
    return [name, arguments, {**shape, "bias": layer.bias is not None}]


def unpacked(layers: list[Any], weights: list[Tensor]) -> dict[str, Part]:
    """The parts by the path of their layer, from `packed`."""
    rest, parts = iter(weights), {}
    for path, scaling, dtype, has_magnitude, *pair in layers:
        down, up = (_made(*description) for description in pair)
        for layer in (down, up):
            for name in [name for name, _ in layer.named_parameters()]:
                setattr(layer, name, nn.Parameter(next(rest), requires_grad=False))
        magnitude = next(rest) if has_magnitude else None
        parts[path] = Part(down, up, scaling, getattr(torch, dtype), magnitude)
    return parts


def _made(name: str, arguments: list[int], options: Mapping[str, Any]) -> nn.Module:
    if name == Kronecker.__name__:
        begin, end = arguments or (None, None)
        span = None if begin is None or end is None else (begin, end)
        return Kronecker(torch.empty(0), torch.empty(0), span)
    if name in _WEIGHT_ONLY:
        return nn.Identity()
    keywords = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
    make: Callable[..., nn.Module] = _CLASSES[name]
    return make(*arguments, **keywords, device="meta")
