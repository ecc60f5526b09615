"""Quick tests of arguments: whether one fuses as an earlier one of its request did."""

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MAX_TESTS = 4096  # kept for all requests: one that a request has just used is in the cache
PLAIN = (bool, int, float, str, type(None))

TensorForm = tuple[torch.Size, torch.dtype, torch.device]
SameTensor = tuple[weakref.ref[Tensor], int]
Test = TensorForm | SameTensor | Callable[[Any], bool]
"""Whether an argument fuses as an earlier one did: data for tensors, as it is asked often."""


class NoTest(Exception):
    """No cheap test tells whether such an argument has changed."""


def passes(test: Test, value: Any) -> bool:
    """Whether a value passes a test."""
    if not isinstance(test, tuple):
        return test(value)
    if not isinstance(value, Tensor):
        return False
    if len(test) == 2:  # the same tensor, unchanged
        return test[0]() is value and value._version == test[1]
    return (value.shape, value.dtype, value.device) == test


def anything(argument: Any) -> bool:
    return True


@lru_cache(maxsize=MAX_TESTS)
def same_value(typed: tuple[type, Any]) -> Callable[[Any], bool]:
    cls, value = typed
    return lambda argument: type(argument) is cls and bool(argument == value)


def same_tensor(value: Any) -> Test:
    if not isinstance(value, Tensor) or value.is_inference():
        raise NoTest  # it does not count its versions: a change would go unseen
    return weakref.ref(value), value._version
