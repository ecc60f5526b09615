"""The keys and values of one text, as an argument of a call that may run more than once.

In a call's arguments, and in a shared forward, each token of a text is a row: (tokens, 1, ...).

A failed forward runs again in parts, and a forward on probation runs twice. So the cache is rewound
to its state before the call whenever the call runs.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from carpool.engine.language.rows import PADDED, LayerRows

LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_EMPTY = getattr(cache_utils, "DummyLayer", None)  # older releases of transformers 5 lack it


class OwnCache:
    """A key-value cache with its state before a call.

    Args:
        tokens: number of tokens of the call.
        positions: their positions, (axes, tokens, 1), for models with several axes.
        mask: the hidden tokens of a padded text: (1, tokens), or complete masks by kind of layer.
        prompt: the `PromptReading` that the call prefills in part.
    """

    def __init__(
        self,
        cache: Cache,
        tokens: int = 1,
        positions: Tensor | None = None,
        mask: Any = None,
        prompt: Any = None,
    ) -> None:
        self.cache, self.tokens, self.positions = cache, tokens, positions
        self.mask, self.prompt = mask, prompt
        self._before = [dict(vars(layer)) for layer in cache.layers]

    @property
    def form(self) -> tuple[Any, ...]:
        """The part that must be equal to share a forward: all but the length."""
        kinds = tuple([getattr(layer, "sliding_window", 0) for layer in self.cache.layers])
        kinds += tuple(self.mask) if isinstance(self.mask, Mapping) else ()
        return kinds, 1 if self.positions is None else self.positions.shape[0]

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
        copied.cache, copied._before = cache, [dict(before) for before in self._before]
        for before in copied._before:
            if isinstance(keys := before.get("keys"), Tensor):
                before["keys"] = keys[:]  # not in the rows of the original, see `rows`
        return copied

    def whole(self, answer: Any) -> Any:
        """The decoder's answer as alone: with the text's cache, its tokens on axis 1."""
        answer.past_key_values = self.cache
        if self.tokens > 1:
            for name, value in answer.items():
                answer[name] = self._by_token(value)
        return answer

    def _by_token(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple([self._by_token(entry) for entry in value])
        has_rows = isinstance(value, Tensor) and value.shape[0] == self.tokens
        return by_row(value) if has_rows else value

    def growth(self) -> Tensor:
        """Keys and values of the token that the call has added: (2 x layers, 1, heads, 1, width).

        Raises:
            RuntimeError: layers differ in heads or width.
        """
        pairs = [(layer.keys, layer.values) for layer in layers_of(self.cache)]
        return torch.stack([tensor[:, :, -1:] for pair in pairs for tensor in pair])

    def grow(self, growth: Tensor) -> None:
        """Add a token as the call would have done, by what `growth` gave."""
        pairs = growth.view(-1, 2, *growth.shape[1:])
        for layer, (keys, values) in zip(layers_of(self.cache), pairs, strict=True):
            layer.update(keys, values)

    def __repr__(self) -> str:
        return f"<{self.cache.get_seq_length()} tokens, {len(self._before)} layers>"


def layers_of(cache: Cache) -> list[Any]:
    """The layers that hold keys and values: others use those of an earlier layer."""
    return [layer for layer in cache.layers if type(layer) is not _EMPTY]


def is_plain(cache: Any) -> bool:
    """Whether a cache is one of keys and values alone, which grow with each token."""
    is_dynamic = type(cache) is DynamicCache and not cache.offloading and bool(cache.layers)
    return is_dynamic and all(
        type(layer) in LAYERS and not getattr(layer, "record_past", False)
        for layer in layers_of(cache)
    )


def can_pack(cache: Any, below: float) -> bool:
    """Whether a cache holds nothing but keys and values of one text, shorter than `below`."""
    return (is_plain(cache) and cache.get_seq_length() + 1 < below) and all(
        layer.is_initialized and layer.keys.shape[0] == 1 for layer in layers_of(cache)
    )


def by_row(tensor: Tensor) -> Tensor:
    """Tokens on axis 0 instead of axis 1, or back."""
    return tensor if tensor.shape[0] == tensor.shape[1] else tensor.transpose(0, 1)


def is_open(mask: Any) -> bool:
    """Whether a mask hides nothing; one that is no tensor does."""
    if not isinstance(mask, Tensor):
        return mask is None
    return bool(((mask == 0) if mask.is_floating_point() else mask).all())


class PackedCache(Cache):  # type: ignore[misc]
    """The caches of several texts for one forward of tokens of each.

    It has no layers: code that reads them would read those of one text. `update` returns each
    text's own keys and values as lists, or those of all texts side by side as tensors.

    Args:
        pads: tokens of texts of similar lengths attend side by side.
    """

    is_compileable = False

    def __init__(self, texts: list[OwnCache], implementation: str, *, pads: bool = False) -> None:
        self.caches, self.implementation = [text.rewound() for text in texts], implementation
        self.masks, self.tokens = [text.mask for text in texts], [text.tokens for text in texts]
        self.layer = 0  # layer of the last mask request
        self._lengths = lengths = [cache.get_seq_length() for cache in self.caches]
        is_token = max(self.tokens) == 1 and min(lengths) > 0 and self.masks == [None] * len(texts)
        self._pads = pads and is_token and len(lengths) * max(lengths) <= PADDED * sum(lengths)
        if self._pads:
            device = layers_of(self.caches[0])[0].keys.device
            self._ends = torch.tensor(lengths).to(device, non_blocking=True)

    def split(self, states: Tensor) -> list[Tensor]:
        """Each text's part of queries, keys or values, (rows, heads, 1, width), as alone."""
        parts = states.split_with_sizes(self.tokens)
        return [part.transpose(0, 2) if len(part) > 1 else part for part in parts]

    def side_by_side(self, layer_idx: int) -> list[Any] | None:
        """A layer of each text, if their tokens attend in one call."""
        layers = [cache.layers[layer_idx] for cache in self.caches]
        window = getattr(layers[0], "sliding_window", None)
        if not self._pads or (window and max(self._lengths) + 1 >= window):
            return None
        return layers if [layer.keys.shape[2] for layer in layers] == self._lengths else None

    def visible(self) -> Tensor | None:
        """The tokens of padded rows that are a text's own: (texts, tokens); None: all."""
        if len(set(self._lengths)) == 1:
            return None
        places = torch.arange(max(self._lengths) + 1, device=self._ends.device)
        return places <= self._ends[:, None]

    def own(self, rows: Tensor) -> list[Tensor]:
        """Each text's own keys or values of padded rows."""
        texts = zip(rows, self._lengths, strict=True)
        return [row[None, :, : length + 1] for row, length in texts]

    is_sliding = property(lambda self: self.caches[0].is_sliding)
    is_linear = property(lambda self: self.caches[0].is_linear)
    is_dummy = property(lambda self: self.caches[0].is_dummy)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        if layers := self.side_by_side(layer_idx):
            return LayerRows.of(layers).add(layers, self._ends, key_states, value_states)
        with torch._C.DisableTorchFunction():  # exact numerics must not intercept this
            texts = zip(self.caches, self.split(key_states), self.split(value_states), strict=True)
            pairs = [cache.update(k, v, layer_idx, *args, **kwargs) for cache, k, v in texts]
        return [key for key, _ in pairs], [value for _, value in pairs]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        lengths: list[int] = [cache.get_seq_length(layer_idx) for cache in self.caches]
        return max(lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self.layer = layer_idx
        sizes: tuple[int, int] = self.caches[0].get_mask_sizes(query_length, layer_idx)
        return sizes
