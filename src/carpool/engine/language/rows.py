"""Keys and values of several texts side by side, so that a token of each attends in one call.

Each text has a row, padded to the longest. Its own cache is a view of the row, with what plain
transformers would have there. Rows grow in place until other texts share the forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

ROOM = 64  # tokens that a row can grow by; half: rows are copied twice as often
PADDED = 2  # length of the rows over the mean length, at most; else each text attends by itself


class LayerRows:
    """Keys and values of one layer: (texts, heads, tokens, width) each.

    Args:
        layers: this layer of each text's cache.
    """

    def __init__(self, layers: Sequence[DynamicLayer]) -> None:
        self.keys = _padded([layer.keys for layer in layers])
        self.values = _padded([layer.values for layer in layers])
        self._parts = list(zip(*map(torch.split, (self.keys, self.values), (1, 1)), strict=True))
        self._places = torch.arange(len(layers), device=self.keys.device)

    @classmethod
    def of(cls, layers: Sequence[Any]) -> "LayerRows":
        """The rows that the layers are views of, in this order, with room; else new ones."""
        rows = getattr(layers[0].keys, "_row", (None,))[0]
        if isinstance(rows, cls) and len(rows._parts) == len(layers):
            marks = [getattr(layer.keys, "_row", None) for layer in layers]
            longest = max(layer.keys.shape[2] for layer in layers)
            if marks == [(rows, place) for place in range(len(layers))]:
                return rows if longest < rows.keys.shape[2] else cls(layers)
        return cls(layers)

    def add(
        self, layers: Sequence[Any], lengths: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add a token to each text, (texts, heads, 1, width); returns all keys and values."""
        self.keys[self._places, :, lengths] = keys[:, :, 0]
        self.values[self._places, :, lengths] = values[:, :, 0]
        texts = enumerate(zip(layers, self._parts, strict=True))
        for place, (layer, (own_keys, own_values)) in texts:
            length = layer.keys.shape[2] + 1
            layer.keys = own_keys.narrow(2, 0, length)
            layer.values = own_values.narrow(2, 0, length)
            layer.keys._row = self, place
            if layer.is_sliding:
                layer.cumulative_length = length
        longest = max(layer.keys.shape[2] for layer in layers)
        return self.keys.narrow(2, 0, longest), self.values.narrow(2, 0, longest)


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    _, heads, _, width = tensors[0].shape
    length = max(tensor.shape[2] for tensor in tensors) + ROOM
    rows = tensors[0].new_zeros((len(tensors), heads, length, width))
    for row, tensor in zip(rows, tensors, strict=True):
        row[:, : tensor.shape[2]] = tensor[0]
    return rows
