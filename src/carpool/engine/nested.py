"""Nested values, such as the arguments and the answers of modules: read and change their leaves."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def leaves_in(value: Any, kind: type[T]) -> Iterator[T]:
    """The values of a class in nested dicts, lists, tuples and latent distributions."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from leaves_in(entry, kind)
    elif isinstance(moments := getattr(value, "parameters", None), kind):
        yield moments


def tensors_in(value: Any) -> Iterator[Tensor]:
    return leaves_in(value, Tensor)


def holds_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(entry, change) for entry in value])
    if isinstance(value, Mapping):  # transformers' and diffusers' outputs are ordered dicts
        fields = {name: mapped(entry, change) for name, entry in value.items()}
        return fields if type(value) is dict else type(value)(**fields)
    if isinstance(moments := getattr(value, "parameters", None), Tensor):
        fixed = {n: v for n, v in vars(value).items() if n == "deterministic"}  # Cosmos has none
        return type(value)(change(moments), **fixed)
    return value
