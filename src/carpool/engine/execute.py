"""Run calls together; when that fails, find the calls at fault and run the others.

A forward that raises is cut in two and each half runs again, until the calls that raise alone are
found: their inputs are still there, so nothing is lost but time. Running out of memory is cut the
same way, and the width that did fit is remembered for that key. So is a width that raises again
though each of its halves runs: a back end that refuses the mask of a fused forward, say.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from carpool.engine.containment import UNCONTAINED
from carpool.engine.intercept import Call
from carpool.errors import OutOfMemory, text_of


class Ready(Protocol):
    """Has a described call: `RequestState`, while it is parked."""

    @property
    def call(self) -> Call: ...

    @property
    def key(self) -> Hashable: ...

    @property
    def rows(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in the place of a call's answer."""

    error: BaseException


REFUSALS = 2  # refusals of one key that narrow its forwards: more than chance


class WidthLimits:
    """The widest forward of a key that fits the memory, or that runs at all."""

    def __init__(self) -> None:
        self._refusals: dict[Hashable, int] = {}
        self._too_wide: dict[Hashable, int] = {}  # rows that did not fit
        self.are_limited = False  # whether any key has run out of memory
        self._fitted: dict[Hashable, int] = {}  # rows that did, of keys that ran out once

    def cap(self, key: Hashable, default: int) -> int:
        """Rows that a forward of this key may have: what fitted, or half of what did not."""
        if key not in self._too_wide:
            return default
        return min(default, self._fitted.get(key, max(1, self._too_wide[key] // 2)))

    def too_wide(self, key: Hashable, rows: int) -> None:
        self.are_limited = True
        self._too_wide[key] = min(rows, self._too_wide.get(key, rows))
        if self._fitted.get(key, 0) >= rows:
            del self._fitted[key]  # there is less memory than there was

    def refused(self, key: Hashable, rows: int) -> None:
        """A forward raised though its calls run in narrower ones."""
        self._refusals[key] = self._refusals.get(key, 0) + 1
        if self._refusals[key] >= REFUSALS:
            self.too_wide(key, rows)

    def fitted(self, key: Hashable, rows: int) -> None:
        if rows < self._too_wide.get(key, 0):
            self._fitted[key] = max(rows, self._fitted.get(key, 0))


RunCalls = Callable[[Sequence[Any]], list[Any]]
"""Makes one forward of calls of one key, each of them `Ready`: their answers, in order."""

Wrapper = Callable[[RunCalls], RunCalls]
"""Stands around a forward: gives a function that does the same, and something beside."""

T = TypeVar("T", bound=Ready)


def execute(
    ready: Sequence[T],
    run: Callable[[Sequence[T]], list[Any]],
    widths: WidthLimits,
    free: Callable[[], None],
) -> list[Any]:
    """Answers, or `Failure`s, for calls of one key, in order.

    Args:
        ready: one or more calls with equal keys.
        run: makes one forward of them.
        widths: learns from forwards that ran out of memory.
        free: gives cached device memory back before another try.
    """
    rows = sum([call.rows for call in ready])
    try:
        answers = run(ready)
        if widths.are_limited:
            widths.fitted(ready[0].key, rows)
        return answers
    except torch.OutOfMemoryError as error:
        failure, is_memory = text_of(error), True
    except UNCONTAINED:
        raise
    except BaseException as error:
        if len(ready) == 1:
            return [Failure(error)]
        is_memory = False
    # Out of the `except`, so that the traceback no longer holds the forward's activations.
    if is_memory:
        free()
        if len(ready) == 1:
            return [Failure(_does_not_fit(ready[0], failure))]
        widths.too_wide(ready[0].key, rows)
    half = len(ready) // 2
    answers = [
        *execute(ready[:half], run, widths, free),
        *execute(ready[half:], run, widths, free),
    ]
    if not is_memory and not any(isinstance(answer, Failure) for answer in answers):
        widths.refused(ready[0].key, rows)
    return answers


def _does_not_fit(call: Ready, detail: str) -> OutOfMemory:
    target = call.call.target
    return OutOfMemory(
        f"{target.component}.{target.method} ran out of device memory with this request alone "
        f"({call.rows} rows): ask for fewer pixels or frames. The device says: {detail}"
    )
