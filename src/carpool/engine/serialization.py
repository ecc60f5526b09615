"""Serialize answers of modules to bytes and back: the same bits, the same classes.

Tensors become their raw bytes. Classes of answers are looked up among loaded modules, and must be
outputs of diffusers or transformers: nothing is imported, and no code is run.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils import BaseOutput
from torch import Tensor
from transformers.utils import ModelOutput

from carpool.engine.digests import raw_bytes
from carpool.engine.nested import mapped

_PLAIN = (bool, int, float, str, type(None))
CopyToHost = Callable[[Tensor], Tensor]


class Unpackable(Exception):
    """An answer holds a value that cannot be serialized."""


def size(answer: Any) -> int:
    """The total bytes of the tensors in an answer.

    Raises:
        Unpackable: the answer cannot be serialized.
    """
    if type(answer) is Tensor:
        if answer.layout is not torch.strided or answer.is_quantized:
            raise Unpackable(f"a tensor of layout {answer.layout}")
        return answer.nbytes
    if type(answer) in (tuple, list):
        return sum([size(entry) for entry in answer])
    if isinstance(answer, (BaseOutput, ModelOutput)) or type(answer) is dict:
        if not all(isinstance(name, str) for name in answer):
            raise Unpackable("names that are no text")
        return sum(map(size, answer.values()))
    if type(answer) is DiagonalGaussianDistribution:
        return size(answer.parameters)
    if type(answer) in _PLAIN:
        return 0
    raise Unpackable(f"a {type(answer).__name__}")


def copied(answer: Any) -> Any:
    """Copy an answer with its tensors, on their devices; any thread may `pack` the copy."""
    views: dict[Any, Tensor] = {}  # the copies so far: fields that share a tensor share its copy
    return mapped(answer, lambda tensor: _copied(tensor.detach(), views))


def _copied(tensor: Tensor, views: dict[Any, Tensor]) -> Tensor:
    """Copy a tensor with its strides: the bits of sums depend on the memory layout."""
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    view = *place, tensor.shape, tensor.stride(), tensor.dtype
    if (copy := views.get(view)) is None:
        copy = tensor.clone()
        if copy.stride() != tensor.stride() and tensor.numel():  # it has gaps or repeated values
            axes = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum((n - 1) * step for n, step in axes)
            flat = tensor.as_strided((length,), (1,)).clone()
            copy = flat.as_strided(tensor.shape, tensor.stride(), 0)
        views[view] = copy
    return copy


def pack(answer: Any, to_host: CopyToHost = lambda tensor: tensor) -> bytes:
    """Serialize an answer that `size` accepts."""
    return msgspec.msgpack.encode(_packed(answer, to_host))


def unpack(packed: bytes, device: torch.device) -> Any:
    """Deserialize an answer from `pack`.

    Args:
        device: the device for tensors that were not on the host.

    Raises:
        ValueError: the bytes are not from `pack`, or name classes that are not loaded.
    """
    try:
        return _unpacked(msgspec.msgpack.decode(packed), device)
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"a damaged answer: {error}") from error


def _packed(value: Any, to_host: CopyToHost) -> list[Any]:
    if isinstance(value, Tensor):
        is_host, is_dense = value.device.type == "cpu", value.is_contiguous()
        if is_dense and is_host and value.dtype is torch.float32:  # fast path for most answers
            raw = value.numpy(force=True).data.cast("B") if value.numel() else b""
        else:
            raw = raw_bytes(value if is_host else to_host(value)).numpy().data
        strides = [] if is_dense else list(value.stride())
        return ["t", _name(value.dtype), list(value.shape), strides, is_host, raw]
    if isinstance(value, (tuple, list)):
        kind = "l" if isinstance(value, list) else "u"
        return [kind, [_packed(entry, to_host) for entry in value]]
    if isinstance(value, Mapping):
        cls, fields = type(value), {n: _packed(entry, to_host) for n, entry in value.items()}
        name = "" if cls is dict else f"{cls.__module__}:{cls.__qualname__}"
        return ["m", name, fields]
    if isinstance(value, DiagonalGaussianDistribution):
        return ["g", _packed(value.parameters, to_host), value.deterministic]
    return ["v", value]


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unpacked(packed: list[Any], device: torch.device) -> Any:
    match packed:
        case ["t", name, shape, strides, is_host, raw]:
            dtype = getattr(torch, name)
            flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0)
            tensor = (flat.view(dtype) if raw else flat.to(dtype)).reshape(shape)
            if strides:  # the bits of sums depend on the memory layout
                tensor = torch.empty_strided(shape, strides, dtype=dtype).copy_(tensor)
            return tensor if is_host else tensor.to(device)
        case ["m", name, fields]:
            cls = _output_class(name) if name else dict
            return cls(**{n: _unpacked(entry, device) for n, entry in fields.items()})
        case ["l", entries]:
            return [_unpacked(entry, device) for entry in entries]
        case ["u", entries]:
            return tuple(_unpacked(entry, device) for entry in entries)
        case ["g", parameters, deterministic]:
            return DiagonalGaussianDistribution(_unpacked(parameters, device), deterministic)
        case ["v", value]:
            return value
    raise ValueError("a damaged answer")


def _output_class(name: str) -> type:
    module, _, path = name.partition(":")
    cls: Any = getattr(sys.modules[module], path)
    if not (isinstance(cls, type) and issubclass(cls, (BaseOutput, ModelOutput))):
        raise ValueError(f"{name} is no class of outputs")
    return cls
