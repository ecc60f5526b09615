"""An adapter's additions to single layers, by PEFT's formulas: LoRA, DoRA and LoKr."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from carpool.errors import LoraRejected


@dataclass(frozen=True, slots=True)
class Part:
    """An adapter's addition to one layer: `up(down(x)) * scaling`; with a magnitude, DoRA.

    DoRA scales each output channel of the changed weight `W + scaling * up @ down` to the length in
    `magnitude`. So it changes the layer's own output, too, by an amount that depends on the scale.
    """

    down: nn.Module  # linear layer or convolution to `rank` channels, or a `Kronecker`
    up: nn.Module
    scaling: float  # alpha / rank
    dtype: torch.dtype  # dtype of the weights
    magnitude: Tensor | None = None  # (out channels,)

    def add(self, layer: nn.Module | None, x: Tensor, output: Tensor, scale: float) -> None:
        """Add this part to rows of a layer's output, in place; DoRA reads the layer's weights."""
        delta, scaling = self.up(self.down(x.to(self.dtype))), scale * self.scaling
        if self.magnitude is None:
            output.add_(delta, alpha=scaling)
            return
        real = base_layer(layer)
        channels = (-1,) + (1,) * (real.weight.ndim - 2)  # channels are the last axis, or axis 1
        share = (self.magnitude / self._lengths(real.weight, scaling)).view(channels)
        product_output = output if real.bias is None else output - real.bias.view(channels)
        output.add_((share - 1) * product_output + share * delta * scaling)

    def _lengths(self, weight: Tensor, scaling: float) -> Tensor:
        """The lengths of the changed weight's output channels."""
        up: Any = self.up.weight
        down: Any = self.down.weight
        product = up.flatten(1) @ down.flatten(1)
        changed: Tensor = weight.to(product.dtype).flatten(1) + scaling * product
        lengths: Tensor = torch.linalg.vector_norm(changed, dim=1)
        return lengths


def packed(parts: Mapping[str, Part]) -> bytes:
    """Parts by the path of their layer, for another process of this program."""
    buffer = io.BytesIO()
    torch.save(dict(parts), buffer)
    return buffer.getvalue()


def unpacked(data: bytes, device: torch.device) -> dict[str, Part]:
    """The parts from `packed`, with their weights on a device."""
    parts: dict[str, Part] = torch.load(io.BytesIO(data), device, weights_only=False)
    return parts


class Kronecker(nn.Module):
    """A linear layer whose weight is the Kronecker product of two matrices (LoKr).

    The product itself is never computed: it is as large as the weight of the model's layer.

    Args:
        span: the range of outputs to return; None: all.
    """

    def __init__(self, first: Tensor, second: Tensor, span: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.span = span
        self.first = nn.Parameter(first, requires_grad=False)  # (a, m)
        self.second = nn.Parameter(second, requires_grad=False)  # (b, n)

    @property
    def in_features(self) -> int:
        return self.first.shape[1] * self.second.shape[1]

    @property
    def out_features(self) -> int:
        whole = self.first.shape[0] * self.second.shape[0]
        return whole if self.span is None else len(range(whole)[slice(*self.span)])

    def forward(self, x: Tensor) -> Tensor:
        cells = x.reshape(*x.shape[:-1], self.first.shape[1], self.second.shape[1])
        product: Tensor = self.first @ (cells @ self.second.T)
        outputs = product.flatten(-2)
        return outputs if self.span is None else outputs[..., slice(*self.span)]


def base_layer(layer: Any) -> Any:
    """The model's own layer below adapter layers that the user has loaded."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def part_of(layer: Any, adapter: str, real: Any, span: tuple[int, int] | None = None) -> Part:
    """Extract the part that PEFT inserted into a weightless twin of the model's real layer.

    Args:
        span: the model's outputs among PEFT's, if the loader fused several layers.

    Raises:
        LoraRejected: it does not fit the layer, or its kind is not supported.
    """
    from peft.tuners.lokr.layer import Linear as LoKrLinear
    from peft.tuners.lora import LoraLayer, variants

    down: Any
    up: Any
    magnitude: Tensor | None = None
    if isinstance(layer, LoKrLinear):
        down, up = Kronecker(*_factors(layer, adapter), span), nn.Identity()
        sizes = (down.in_features,), down.out_features
    elif isinstance(layer, LoraLayer) and adapter in layer.lora_A:
        variant = layer.lora_variant.get(adapter)
        if variant is not None:
            dora = (variants.DoraLinearVariant, variants.DoraConv1dVariant,
                    variants.DoraConv2dVariant, variants.DoraConv3dVariant)  # fmt: skip
            if type(variant) not in dora:
                raise LoraRejected(f"it has a {type(variant).__name__}, which is not served")
            vectors: Any = layer.lora_magnitude_vector
            magnitude = vectors[adapter].weight.detach().flatten()
        down, up = layer.lora_A[adapter], layer.lora_B[adapter]
        sizes = tuple(down.weight.shape[1:]), up.weight.shape[0]
    else:
        raise LoraRejected(f"it has a {type(layer).__name__}, which is not served")
    if sizes != sizes_of(real):
        rule = "the adapter is of another model"
        if sizes == sizes_of(layer):  # the loader has widened it
            rule = "a control adapter, which widens it: load it in a --pipeline of yours"
        raise LoraRejected(
            f"the weights are for a layer of {_show(*sizes)}, this model's is of "
            f"{_show(*sizes_of(real))}: {rule}"
        )
    if magnitude is not None and is_quantized(real):
        raise LoraRejected(
            "DoRA needs the layer's own weights, and those are quantized: load the model "
            "unquantized, or take an adapter that is plain LoRA"
        )
    if magnitude is not None and not magnitude.is_meta and not magnitude.any():
        # the loader skipped the file's magnitude, as for text encoders: PEFT starts with the length
        # attributes of weights that the shadow lacks
        magnitude = base_layer(real).weight.detach().flatten(1).norm(dim=1)
    scaling = layer.scaling[adapter]
    if not isinstance(scaling, (int, float)) and scaling.numel() != 1:
        raise LoraRejected(f"its alpha has {scaling.numel()} entries: must be one number")
    return Part(down, up, float(scaling), _dtype(real), magnitude)


def _factors(layer: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """The two matrices of a LoKr, each stored whole or as a product of two."""

    def factor(name: str) -> Tensor:
        whole: Any = getattr(layer, name)
        if adapter in whole:
            return cast("Tensor", whole[adapter].detach())
        first, second = (getattr(layer, f"{name}_{side}")[adapter].detach() for side in "ab")
        return cast("Tensor", first @ second)

    return factor("lokr_w1"), factor("lokr_w2")


def sizes_of(layer: Any) -> tuple[tuple[int, ...], int]:
    """Input and output sizes of a linear layer or convolution, with its kernel."""
    layer = base_layer(layer)
    if hasattr(layer, "in_features"):  # quantized weights are packed into another shape
        return (layer.in_features,), layer.out_features
    return tuple(layer.weight.shape[1:]), layer.weight.shape[0]


def is_quantized(layer: Any) -> bool:
    """Whether a layer's weights are quantized: packed, or of an inexact type."""
    weight = base_layer(layer).weight
    takes, gives = sizes_of(layer)
    is_packed = tuple(weight.shape) != (gives, *takes)
    is_plain = type(weight) in (Tensor, nn.Parameter) and type(weight.data) is Tensor
    return is_packed or not is_plain or not _is_exact(weight.dtype)


def _is_exact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _dtype(real: Any) -> torch.dtype:
    """The dtype in which a layer computes, and PEFT its addition."""
    layer = base_layer(real)
    dtype: torch.dtype = getattr(layer, "compute_dtype", None) or layer.weight.dtype
    return dtype if _is_exact(dtype) else torch.bfloat16


def _show(takes: tuple[int, ...], gives: int) -> str:
    return f"{'x'.join(map(str, takes))} to {gives}"
