"""The process's global random numbers, one stream a request.

Some pipelines and modules draw from the global generators of torch, numpy or `random` instead of
the generator passed to them. Each request sees these as if the process had just been seeded with
its seed and no other code drew from them; outside of requests they keep the application's
state.

The states of the generators are swapped, and no function is replaced: names bound earlier
(`from random import random`) draw from the same objects.
"""

import ctypes
import functools
import random
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from carpool.engine.fiber import current_context
from carpool.engine.patches import Patches

_spare: list[Any] = []  # numpy's generators are slow to create, fast to seed
_numpy: Any = np.random  # its stubs lack two functions used here
_thread = threading.local()


def default_generators(device: torch.device | None = None) -> list[torch.Generator]:
    """The global random generators of accelerators: that of `device`, or of all."""
    kind = device or torch.accelerator.current_accelerator()
    if kind is None or kind.type == "cpu" or not torch.accelerator.is_available():
        return []
    if kind.type == "mps":
        return [torch.mps._get_default_mps_generator()]
    generators = list(getattr(torch.get_device_module(kind), "default_generators", ()))
    if device is None or not generators:
        return generators
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return [generators[index]]


@dataclass(frozen=True, slots=True, eq=False)
class _States:
    """The states of all global generators at one moment."""

    torch: tuple[torch.Tensor, ...]
    numpy: Any  # the generator itself
    numbers: bytes  # its state, if it is numpy's default generator
    gauss: float | None  # numpy's cached second normal number
    python: tuple[Any, float | None]  # its numbers, and its cached second normal number


class RandomState:
    """One request's own global random numbers."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = [torch.default_generator, *default_generators(device)]
        self._bits = _spare.pop() if _spare else np.random.MT19937(0)
        self.states: _States | None = None  # while paused; None: never ran
        self._outside: _States
        self._depth = 0

    def enter(self) -> None:
        """Switch to the request's generators, unless already switched."""
        self._depth += 1
        if self._depth == 1:
            _thread.numbers = self
            self._outside = _exchanged(self._generators, self.states)
            if self.states is None:
                self._begin()

    def leave(self) -> None:
        """Switch back to the process's generators, at the outermost `leave`."""
        self._depth -= 1
        if self._depth == 0:
            self.states = _exchanged(self._generators, self._outside)
            _thread.numbers = None

    def has_moved(self, since: "_States | None") -> bool:
        """Whether numbers were drawn since; call it while paused."""
        now = self.states
        return (
            now is None
            or since is None
            or now.numbers != since.numbers
            or now.gauss != since.gauss
            or now.python != since.python
            or not all(map(torch.equal, now.torch, since.torch))
        )

    def go_back(self, to: "_States | None") -> None:
        """Return to earlier states; call it while paused."""
        if to is not None and to.numbers:
            ctypes.memmove(to.numpy.ctypes.state_address, to.numbers, len(to.numbers))
        self.states = to

    def abandon(self) -> bool:
        """Switch back for good, on another thread; returns whether there was need to."""
        if is_entered := self._depth > 0:
            self._depth = 1
            self.leave()
        return is_entered

    def free(self) -> None:
        """Release resources at the end of the request; call it while paused."""
        _spare.append(self._bits)

    def _begin(self) -> None:
        for generator in self._generators:
            generator.manual_seed(self._seed)
        _numpy.set_bit_generator(self._bits)
        np.random.seed(self._seed % 2**32)
        random.seed(self._seed)


def _exchanged(generators: list[torch.Generator], states: _States | None) -> _States:
    """Replace the current states, unless `states` is None; returns the former ones."""
    bits = _numpy.get_bit_generator()
    is_usual = isinstance(bits, np.random.MT19937)
    numbers = ctypes.string_at(bits.ctypes.state_address, _BYTES) if is_usual else b""
    gauss = None
    if is_usual and getattr(_thread, "put", None) != (bits, numbers):
        state = np.random.get_state(legacy=False)  # slow, but rare
        gauss = state["gauss"] if state["has_gauss"] else None
    bit_states = tuple([generator.get_state() for generator in generators])
    own_numbers = random.getstate()[1] if _memory is None else bytes(_memory)
    python = own_numbers, _python.gauss_next
    before = _States(bit_states, bits, numbers, gauss, python)
    if states is None:
        return before
    for generator, own_state in zip(generators, states.torch, strict=True):
        generator.set_state(own_state)
    _numpy.set_bit_generator(states.numpy)  # this clears the cached normal number
    _thread.put = states.numpy, states.numbers
    if states.gauss is not None:
        np.random.set_state(
            {**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": states.gauss}
        )
        _thread.put = None
    if _memory is None:
        random.setstate((random.Random.VERSION, *states.python))
    else:
        _memory[:], _python.gauss_next = states.python
    return before


def hide() -> tuple[RandomState, int] | None:
    """Suspend the current request's generators while a forward pauses; `show` resumes them."""
    numbers: RandomState | None = getattr(_thread, "numbers", None)
    if numbers is None:
        return None
    depth, numbers._depth = numbers._depth, 1
    numbers.leave()
    return numbers, depth


def show(hidden_numbers: tuple[RandomState, int] | None) -> None:
    """Resume the generators from `hide` when the forward continues."""
    if hidden_numbers is not None:
        numbers, depth = hidden_numbers
        numbers.enter()
        numbers._depth = depth


def _where_the_generator_is(plain: Any) -> Callable[..., Any]:
    """Wrap a random function of torch: in a fiber it draws on the generator's device, and copies.

    Requests have CPU generators, so that a seed gives the same noise on any device; torch refuses
    to draw on another device with them.
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


def _python_memory() -> memoryview | None:
    """The memory of Python's generator, as CPython has it; None for another layout.

    `random.getstate` and `setstate` convert 625 objects each: 17 us, at each pause of a request.
    """
    numbers = (ctypes.c_char * _BYTES).from_address(id(_python) + object.__basicsize__)
    *state, index = random.getstate()[1]
    is_usual = struct.unpack("625I", numbers) == (index, *state)
    return memoryview(numbers).cast("B") if is_usual else None


_BYTES = 625 * 4  # bytes of numpy's default generator, and of Python's: 624 numbers and an index
_python: Any = random.random.__self__  # type: ignore[attr-defined]
_memory = _python_memory() if sys.implementation.name == "cpython" else None
PATCHES = (Patches(torch, dict.fromkeys(("rand", "randn", "randint"), _where_the_generator_is)),)
