"""Record the forwards of an engine's burst, and run them again without an engine.

The forwards are those of the measured burst: the modules record the size of each call, and keep the
arguments of the first call of each size; the bare run repeats the calls in the same order with
these arguments.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

HEAVY = {"text_encoder": "forward", "text_encoder_2": "forward", "transformer": "forward",
         "vae": "decode"}  # fmt: skip


class ForwardLog:
    """Records the heavy calls of a pipeline's modules, to repeat them without an engine."""

    def __init__(self, pipe: Any) -> None:
        self.sizes: list[tuple[Hashable, ...]] = []  # size of each call, in order
        self._samples: dict[tuple[Hashable, ...], Callable[[], Any]] = {}
        for component, method in HEAVY.items():
            module = getattr(pipe, component, None)
            if module is not None:
                module.__dict__[method] = self._logged(component, getattr(module, method))

    def _logged(self, component: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # keeps the signature, which the engine reads
        def method(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            size = component, *[value.shape for value in values if isinstance(value, torch.Tensor)]
            self.sizes.append(size)
            if size not in self._samples:
                self._samples[size] = functools.partial(original, *args, **kwargs)
            return original(*args, **kwargs)

        return method

    def taken(self) -> list[tuple[Hashable, ...]]:
        """Return and clear the recorded sizes."""
        sizes, self.sizes = self.sizes, []
        return sizes

    @torch.no_grad()
    def bare(self, sizes: Sequence[tuple[Hashable, ...]]) -> None:
        """Run only these calls."""
        for size in sizes:
            self._samples[size]()
