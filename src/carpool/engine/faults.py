"""Fault injection, for tests: switched on by the environment variable `CARPOOL_FAULT`.

A fault is `POINT:WHAT:WHEN`; several are separated by commas. The points are the stages of a turn.
`forward` is where the main loop runs a forward, so `execute` handles an injected fault like a real
one; each other point is a boundary of `containment.py`, except `turn`, which is outside of all of
them. `noise` changes the last bits of a fused forward's output, as most devices do: a test that
passes under `forward:noise:1` does not depend on its processor.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, get_args

import torch
from torch import Tensor

from carpool.config import FAULT_VARIABLE
from carpool.engine.containment import RequestStage, TurnStage
from carpool.engine.execute import RunCalls
from carpool.engine.nested import mapped
from carpool.engine.request import RequestState
from carpool.errors import InvalidValue

POINTS = ("forward", "turn", *get_args(RequestStage), *get_args(TurnStage))


class Unprintable(Exception):
    """Its message cannot be read."""

    def __str__(self) -> str:
        raise self

    __repr__ = __str__


def _raise(error: Callable[[], BaseException]) -> Callable[[], None]:
    def strike() -> None:
        raise error()

    return strike


ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: RuntimeError("a fault on purpose"),
    "value": lambda: ValueError("half a character on purpose: \ud800"),
    "stop": StopIteration,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "generator": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "unprintable": Unprintable,
}
_STRIKES: dict[str, Callable[[], None]] = {
    "memory": _raise(lambda: torch.OutOfMemoryError("a fault on purpose: no memory")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1e9),
    **{name: _raise(error) for name, error in ERRORS.items()},
}
WHATS = (*_STRIKES, "noise")
# Sixteen last bits: on AMD Zen 5, larger deviations of fused forwards were seen. It changes some of
# an image's 12,288 8-bit values by one; a single last bit would change one in every other image.
_NOISE = 2**-19


class Faults:
    """The injected faults.

    Args:
        faults: `POINT:WHAT:WHEN` each. WHEN is the probability at each passing of the point, or
            `seed=N` for each forward with a request of this seed.
        seed: the seed of the random numbers.

    Raises:
        InvalidValue: a fault that does not exist.
    """

    def __init__(self, faults: Sequence[str], seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._random = torch.Generator().manual_seed(seed)
        self._faults = [_parsed(text) for text in faults]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self | None:
        """The faults listed in `CARPOOL_FAULT`; None if it is empty."""
        faults = [text for text in environ.get(FAULT_VARIABLE, "").split(",") if text]
        return cls(faults) if faults else None

    def around(self, run: RunCalls, *, is_exact: bool = False) -> RunCalls:
        """Wrap a forward with these faults.

        Args:
            is_exact: exact numerics, in which a fused forward has no noise.
        """

        def faulty(states: Sequence[RequestState]) -> list[Any]:
            due = self.strike("forward", states)
            answers = run(states)
            if "noise" in due and len(states) > 1 and not is_exact:
                return [mapped(answer, self._noisy) for answer in answers]
            return answers

        return faulty

    def strike(self, point: str, states: Iterable[RequestState] = ()) -> list[str]:
        """Pass a point with these requests; returns the due faults."""
        due = self.due(point, {state.request.seed for state in states})
        for effect in due:
            if effect in _STRIKES:
                _STRIKES[effect]()
        return due

    def due(self, point: str, seeds: set[int]) -> list[str]:
        """The faults that are due at this passing of a point."""
        return [
            effect
            for where, effect, probability, seed in self._faults
            if where == point and (seed in seeds or self._dice.random() < probability)
        ]

    def _noisy(self, value: Tensor) -> Tensor:
        """Change a tensor's last bits; zeros, infinities and NaN stay."""
        if not value.is_floating_point():
            return value
        # a separate generator: faults must not draw from those of requests
        random = torch.rand(value.shape, generator=self._random).to(value)
        return value * (1 + (2 * random - 1) * max(_NOISE, torch.finfo(value.dtype).eps))


def _parsed(text: str) -> tuple[str, str, float, int | None]:
    point, effect, when = [*text.split(":", 2), "", ""][:3]
    rule = f"must be POINT:WHAT:WHEN with POINT of {', '.join(POINTS)}, WHAT of {', '.join(WHATS)}"
    if point not in POINTS or effect not in WHATS:
        raise InvalidValue(f"fault {text!r}: {rule}")
    try:
        if when.startswith("seed="):
            return point, effect, 0.0, int(when.removeprefix("seed="))
        probability = float(when)
    except ValueError:
        probability = -1.0
    if not 0 <= probability <= 1:
        raise InvalidValue(f"fault {text!r}: {rule}, WHEN a probability or seed=N")
    return point, effect, probability, None
