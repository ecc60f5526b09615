"""The forwards of an engine's burst, noted, and run again with nothing around them.

They are those of the very burst that was measured: the modules note the size of each call, and keep
the arguments of the first call of each size; the bare run makes the same calls in the same order
with these.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from benchmarks.parts import FORWARDS, Parts

HEAVY = {"text_encoder": "forward", "text_encoder_2": "forward", "transformer": "forward",
         "vae": "decode"}  # fmt: skip


class ForwardLog:
    """Notes the heavy calls that reach a pipeline's modules, to run as many of them again bare."""

    def __init__(self, pipe: Any, parts: Parts) -> None:
        self.sizes: list[tuple[Hashable, ...]] = []  # of each call, in their order
        self._samples: dict[tuple[Hashable, ...], Callable[[], Any]] = {}
        for component, method in HEAVY.items():
            module = getattr(pipe, component, None)
            if module is None:
                continue
            original = parts.timed(FORWARDS, getattr(module, method))
            module.__dict__[method] = self._logged(component, original)

    def _logged(self, component: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # keeps the signature, by which the engine knows arguments
        def method(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            size = component, *[value.shape for value in values if isinstance(value, torch.Tensor)]
            self.sizes.append(size)
            if size not in self._samples:
                self._samples[size] = functools.partial(original, *args, **kwargs)
            return original(*args, **kwargs)

        return method

    def taken(self) -> list[tuple[Hashable, ...]]:
        """What was noted since the last time."""
        sizes, self.sizes = self.sizes, []
        return sizes

    @torch.no_grad()
    def bare(self, sizes: Sequence[tuple[Hashable, ...]]) -> None:
        """Run these calls and nothing else."""
        for size in sizes:
            self._samples[size]()
