"""The keys and values of one text, as an argument of a call that may run more than once.

A failed forward runs again in parts, and a forward on probation runs twice. So the cache is rewound
to its state before the call whenever the call runs.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class OwnCache:
    """A key-value cache with its state before a call.

    Args:
        positions: the token's positions, (axes, 1, 1), for models with several axes.
    """

    def __init__(self, cache: Cache, positions: Tensor | None = None) -> None:
        self.cache, self.positions = cache, positions
        self._before = [dict(vars(layer)) for layer in cache.layers]

    @property
    def form(self) -> tuple[Any, ...]:
        """The part that must be equal to share a forward: all but the length."""
        first, axes = self.cache.layers[0], 1
        if self.positions is not None:
            axes = self.positions.shape[0]
        kinds = tuple([getattr(layer, "sliding_window", 0) for layer in self.cache.layers])
        return kinds, first.dtype, first.device, first.keys.shape[1], axes

    def rewound(self) -> Cache:
        """Rewind the cache to its state before the call, and return it."""
        for layer, before in zip(self.cache.layers, self._before, strict=True):
            vars(layer).update(before)
        return self.cache

    def copied(self) -> "OwnCache":
        """A copy in the same state, for a trial forward."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        copied = copy.copy(self)
        copied.cache = cache
        return copied

    def __repr__(self) -> str:
        return f"<cache of {len(self._before)} layers>"


def can_pack(cache: Any) -> bool:
    """Whether a cache holds only keys and values of one text that grow with each token."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(
            type(layer) in _LAYERS
            and layer.is_initialized
            and layer.keys.shape[0] == 1
            and not getattr(layer, "record_past", False)
            for layer in cache.layers
        )
        and bool(cache.layers)
    )


class PackedCache(Cache):  # type: ignore[misc]
    """The caches of several texts for one forward of a token of each: one row per text.

    It has no layers: code that reads them would read those of one text. `update` returns each row's
    own keys and values, as lists.
    """

    is_compileable = False

    def __init__(self, caches: list[Cache], implementation: str) -> None:
        self.caches, self.implementation = caches, implementation
        self.layer = 0  # layer of the last mask request

    @property
    def is_sliding(self) -> list[bool]:
        are_sliding: list[bool] = self.caches[0].is_sliding
        return are_sliding

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self.is_sliding)

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self.is_sliding)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        with torch._C.DisableTorchFunction():  # exact numerics must not intercept this
            keys, values = key_states.chunk(len(self.caches)), value_states.chunk(len(self.caches))
            rows = zip(self.caches, keys, values, strict=True)
            pairs = [cache.update(k, v, layer_idx, *args, **kwargs) for cache, k, v in rows]
        return [key for key, _ in pairs], [value for _, value in pairs]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        lengths: list[int] = [cache.get_seq_length(layer_idx) for cache in self.caches]
        return max(lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self.layer = layer_idx
        sizes: tuple[int, int] = self.caches[0].get_mask_sizes(query_length, layer_idx)
        return sizes
