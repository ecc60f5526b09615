"""Torch's operations by name: their dependence on the batch, and the axes they reduce."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


WEIGHTED = _names(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "layer_norm group_norm rms_norm instance_norm prelu"
)  # only their first tensor has rows
BY_ENTRY = _names(
    "silu sigmoid logsigmoid gelu tanh exp exp2 expm1 log log1p log2 sin cos pow softplus mish elu "
    "selu celu hardswish erf rsqrt sqrt sinc lerp addcmul addcdiv glu polar reciprocal square "
    "__pow__ __rpow__ interpolate scaled_dot_product_attention avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool2d pixel_shuffle grid_sample"
)
OVER_AXES = _names(
    "mean sum std var var_mean std_mean norm vector_norm softmax log_softmax logsumexp cumsum "
    "cumprod normalize prod linalg_norm linalg_vector_norm nansum"
)  # can be split if they do not reduce axis 0
PRODUCTS = _names("matmul __matmul__ __rmatmul__ bmm baddbmm einsum mm addmm addbmm")

BY_CALL = WEIGHTED | BY_ENTRY | OVER_AXES | PRODUCTS
"""Names of the split operations."""

FACTORIES = _names(
    "expand repeat repeat_interleave broadcast_to tile zeros ones full empty new_zeros new_ones "
    "new_full new_empty"
)  # a result with the batch's size on axis 0 counts as a batch
JOINS = _names("stack cat concat concatenate pad_sequence __setitem__ hstack vstack")
CUTS = _names("unbind split tensor_split chunk unsafe_split unsafe_chunk __iter__")
READS = _names(
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ is_nonzero equal allclose "
    "nonzero argwhere __contains__ __array__ masked_select unique"
)
PICKS = _names("__getitem__ select narrow index_select")
OVER_ROWS = _names("max min amax amin any all argmax argmin median mean sum")
FACTS = _names("device dtype shape ndim layout is_cuda requires_grad")  # attributes without values
HANDLES = _names("size dim stride numel is_contiguous is_floating_point")


def tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    operands = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            operands.append(value)
        elif isinstance(value, (list, tuple)):
            operands += [entry for entry in value if isinstance(entry, Tensor)]
    return operands


def axis(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], place: int | None = None
) -> int:
    """The axis along which an operation splits or joins."""
    if place is None:
        place = 1 if name in ("unbind", "__iter__", "select", "narrow", "index_select") else 2
    axis = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else 0))
    first = args[0][0] if args and isinstance(args[0], (list, tuple)) else args[0] if args else None
    ndim = first.ndim if isinstance(first, Tensor) else 1
    return int(axis) % max(1, ndim)


def axes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int) -> set[int]:
    """The axes that a reduction reduces; all if it names none."""
    place = {"norm": 2, "vector_norm": 2, "linalg_norm": 2, "linalg_vector_norm": 2, "normalize": 2}
    position = place.get(name, 1)
    dim = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else None))
    if dim is None and name == "normalize":
        dim = 1
    if dim is None or isinstance(dim, Tensor):
        return set(range(ndim))
    axes = dim if isinstance(dim, (list, tuple)) else [dim]
    return {int(axis) % max(1, ndim) for axis in axes}


def is_unbatched(name: str, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name.startswith("conv"):
        return x.ndim != int(name[-2]) + 2
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return x.ndim <= len(shape)
    return x.ndim < 2
