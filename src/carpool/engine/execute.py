"""Run calls together; when that fails, find the calls at fault and run the others.

A forward that raises is cut in two and each half runs again, until the calls that raise alone are
isolated: their inputs still exist, so only time is lost. An out-of-memory error is handled the same
way, and the width that did fit is remembered for that key. So is a width that raises again though
each of its halves runs, as when a back end refuses the mask of a fused forward. A call that runs
out of memory alone runs again with freed memory, then in tiles.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from carpool.engine.containment import UNCONTAINED
from carpool.engine.intercept import Call
from carpool.engine.language.parts import WRITING
from carpool.errors import OutOfMemory, text_of


class Ready(Protocol):
    """Holds a described call: `RequestState`, while it is parked."""

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


REFUSALS = 2  # refusals of one key before its forwards are narrowed; one may be chance


class WidthLimits:
    """The widest forward of each key that fits in memory, or runs at all."""

    def __init__(self) -> None:
        self._refusals: dict[Hashable, int] = {}
        self._too_wide: dict[Hashable, int] = {}  # rows that ran out of memory
        self.are_limited = False  # whether any key has run out of memory
        self._fitted: dict[Hashable, int] = {}  # rows that fit, after a lack of memory

    def cap(self, key: Hashable, default: int) -> int:
        """Max rows of a forward of this key: those that fitted, or half of those that did not."""
        if key not in self._too_wide:
            return default
        return min(default, self._fitted.get(key, max(1, self._too_wide[key] // 2)))

    def too_wide(self, key: Hashable, rows: int) -> None:
        self.are_limited = True
        self._too_wide[key] = min(rows, self._too_wide.get(key, rows))
        if self._fitted.get(key, 0) >= rows:
            del self._fitted[key]  # less memory is free than before

    def refused(self, key: Hashable, rows: int) -> None:
        """Note a forward that raised though its calls run in narrower forwards."""
        self._refusals[key] = self._refusals.get(key, 0) + 1
        if self._refusals[key] >= REFUSALS:
            self.too_wide(key, rows)

    def fitted(self, key: Hashable, rows: int) -> None:
        if rows < self._too_wide.get(key, 0):
            self._fitted[key] = max(rows, self._fitted.get(key, 0))


RunCalls = Callable[[Sequence[Any]], list[Any]]
"""Runs calls of one key, each `Ready`, as one forward; returns their answers in order."""

Wrapper = Callable[[RunCalls], RunCalls]
"""Wraps the function that runs a forward, like a decorator."""

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
        run: runs them as one forward.
        widths: records widths that ran out of memory.
        free: releases cached device memory before a retry.
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
    parts = ready[:half], ready[half:]
    answers = [answer for part in parts for answer in execute(part, run, widths, free)]
    if not is_memory and not any(isinstance(answer, Failure) for answer in answers):
        widths.refused(ready[0].key, rows)
    return answers


def fitting(run: RunCalls, free: Callable[[], None]) -> RunCalls:
    """Wrap a forward: a call that runs out of memory alone runs again, then in tiles.

    Args:
        free: releases cached device memory before a retry.
    """

    def fits(ready: Sequence[Any]) -> list[Any]:
        call = ready[0].call
        is_text = call.target.method in WRITING and call.target.spec is None
        rewind = _rewind_of(call) if is_text else (lambda: None)
        try:
            return run(ready)
        except torch.OutOfMemoryError:
            if len(ready) > 1 or rewind is None:
                raise
        # Out of the `except`, so that the traceback no longer holds the forward's activations.
        rewind()
        free()
        try:
            return run(ready)
        except torch.OutOfMemoryError:
            module = ready[0].call.target.module
            if not hasattr(module, "enable_tiling") or getattr(module, "use_tiling", True):
                raise
        free()
        return _in_tiles(run, ready[0])

    return fits


def _rewind_of(call: Call) -> Callable[[], object] | None:
    """Undoes what a call may add to the cache of its text; None: that cannot be undone."""
    from carpool.engine.language.own_cache import OwnCache, is_plain  # they import transformers

    cache = call.kwargs.get("past_key_values")
    return OwnCache(cache).rewound if is_plain(cache) else None


def _in_tiles(run: RunCalls, state: Any) -> list[Any]:
    target = state.call.target
    module: Any = target.module
    module.enable_tiling()
    try:
        answers = run([state])
    finally:
        module.use_tiling = False
    state.warnings.append(
        f"{target.component}.{target.method} did not fit the device's memory and ran in tiles: "
        "seams may show; a smaller size needs none"
    )
    return answers


def _does_not_fit(call: Ready, detail: str) -> OutOfMemory:
    target = call.call.target
    return OutOfMemory(
        f"{target.component}.{target.method} ran out of device memory with this request alone "
        f"({call.rows} rows): ask for fewer pixels or frames. The device says: {detail}"
    )
