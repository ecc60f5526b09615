"""The process's global random numbers, one stream a request.

Some pipelines draw from the global generators of torch, numpy or `random` instead of the generator
that they are given. A request sees these as if the process had just been seeded with its seed and
nobody else drew from them; outside of requests they are as the application left them.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from carpool.engine.fiber import current_context
from carpool.engine.patches import Patches

_FUNCTIONS = [
    name
    for name in random.__all__
    if isinstance(getattr(getattr(random, name), "__self__", None), random.Random)
]
_spare: list[Any] = []  # numpy's generators are slow to make, fast to seed


def default_generators(device: torch.device | None = None) -> list[torch.Generator]:
    """The global random generators of accelerators: that of `device`, or of all."""
    kind = device or torch.accelerator.current_accelerator()
    if kind is None or kind.type == "cpu" or not torch.accelerator.is_available():
        return []
    if kind.type == "mps":
        return [torch.mps._get_default_mps_generator()]
    found = list(getattr(torch.get_device_module(kind), "default_generators", ()))
    if device is None or not found:
        return found
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return [found[index]]


class RandomState:
    """One request's own global random numbers."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._is_seeded = seed, False
        self._generators: list[torch.Generator] = [torch.default_generator]
        self._generators += default_generators(device)
        self._states = [torch.empty(0)] * len(self._generators)  # of whoever is not running
        self._numpy = _spare.pop() if _spare else np.random.MT19937(0)

    @functools.cached_property
    def python(self) -> random.Random:
        return random.Random(self._seed)

    def swap(self) -> None:
        """Exchange the request's state and the process's: before it runs, and after."""
        for i, generator in enumerate(self._generators):
            others, mine = generator.get_state(), self._states[i]
            self._states[i] = others
            if self._is_seeded:
                generator.set_state(mine)
            else:
                generator.manual_seed(self._seed)
        numpy: Any = np.random  # its stubs lack two of its functions
        others_bits, mine_bits = numpy.get_bit_generator(), self._numpy
        numpy.set_bit_generator(mine_bits)
        self._numpy = others_bits
        if not self._is_seeded:
            np.random.seed(self._seed % 2**32)
            self._is_seeded = True

    def free(self) -> None:
        """The request has ended; called between its runs."""
        _spare.append(self._numpy)


def _per_request(plain: Any) -> Callable[..., Any]:
    """A function of `random` that draws, in a fiber, from its request's stream."""

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None:
            return plain(*args, **kwargs)
        return getattr(context.random.python, plain.__name__)(*args, **kwargs)

    return function


def _where_the_generator_is(plain: Any) -> Callable[..., Any]:
    """A function of torch that draws, in a fiber, where its generator is, and copies.

    Requests have generators of the CPU, so that a seed gives the same noise on any device; torch
    refuses to draw on another device with them.
    """

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        generator, device = kwargs.get("generator"), kwargs.get("device")
        if generator is None or device is None or current_context() is None:
            return plain(*args, **kwargs)
        if generator.device.type == torch.device(device).type:
            return plain(*args, **kwargs)
        return plain(*args, **{**kwargs, "device": generator.device}).to(device)

    return function


PATCHES = (
    Patches(random, dict.fromkeys(_FUNCTIONS, _per_request)),
    Patches(torch, dict.fromkeys(("rand", "randn", "randint"), _where_the_generator_is)),
)
