"""Wrap the forwards of engines; record them, and run them again without an engine.

The engine's own function is wrapped: requests would run alone on wrapped modules, which may share
state.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from msgspec import structs

from carpool.engine.fuse import Fuser
from carpool.engine.intercept import Call, Target

RunForward = Callable[[Sequence[Call], Sequence[int]], list[Any]]
"""Runs calls as one forward; the second argument has their numbers of rows."""


@contextmanager
def wrapped_forwards(
    wrapper: Callable[[RunForward, Sequence[Call], Sequence[int]], list[Any]],
) -> Iterator[None]:
    """Run the forwards of all engines of this process through a wrapper."""
    plain = Fuser.run
    Fuser.run = lambda fuser, *args: wrapper(partial(plain, fuser), *args)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Fuser.run = plain  # type: ignore[method-assign]


class ForwardLog:
    """A wrapper of forwards that records their sizes, and the first arguments of each size."""

    def __init__(self) -> None:
        self.sizes: list[tuple[Hashable, ...]] = []  # size of each forward, in order
        self._samples: dict[tuple[Hashable, ...], Callable[[], Any]] = {}

    def __call__(self, run: RunForward, calls: Sequence[Call], rows: Sequence[int]) -> list[Any]:
        target = calls[0].target
        logged = replace(target, original=partial(self._logged, target))
        return run([structs.replace(call, target=logged) for call in calls], rows)

    def _logged(self, target: Target, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        tensors = [value.shape for value in values if isinstance(value, torch.Tensor)]
        size = target.component, target.method, *tensors
        self.sizes.append(size)
        self._samples.setdefault(size, partial(target.original, *args, **kwargs))
        return target.original(*args, **kwargs)

    @torch.no_grad()
    def bare(self, sizes: Sequence[tuple[Hashable, ...]]) -> None:
        """Run only these forwards."""
        for size in sizes:
            self._samples[size]()
