"""Find single-token calls of language models, which share forwards with other texts' calls."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.cache_utils import Cache

from carpool.engine.language.own_cache import OwnCache, can_pack, is_open
from carpool.engine.language.packed import HEAD, SPECS, Decoder
from carpool.engine.language.parts import decoder_of, head_of
from carpool.engine.language.prompt import prompt_of


class PackedTokens:
    """Reads the calls of a language model: finds single-token calls that can be packed.

    Args:
        decoder: the layers of the model.
        head: computes logits from the decoder's output; None: it is too small to matter.
    """

    specs, of_head = SPECS, HEAD  # how their calls fuse
    prompt = staticmethod(prompt_of)

    def __init__(self, decoder: nn.Module, head: nn.Module | None) -> None:
        self.decoder, self.head = decoder, head
        self._open: WeakKeyDictionary[Cache, bool] = WeakKeyDictionary()  # texts without padding

    def run(self, original: Callable[..., Any]) -> Decoder:
        """The decoder's forward for calls in the form of `SPECS`."""
        return Decoder(self.decoder, original)

    def is_token(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call of a whole model is for one token of one text."""
        ids = arguments.get("input_ids")
        is_single = isinstance(ids, Tensor) and ids.shape == (1, 1)
        return is_single and can_pack(arguments.get("past_key_values"))

    def packable(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a decoder's call in the form of `SPECS`; None if it runs alone."""
        present = {name: value for name, value in arguments.items() if value is not None}
        cache, mask = present.pop("past_key_values", None), present.pop("attention_mask", None)
        positions = present.get("position_ids")
        leads = [present[name] for name in ("input_ids", "inputs_embeds") if name in present]
        if len(leads) != 1 or leads[0].shape[:2] != (1, 1) or not can_pack(cache):
            return None
        if not isinstance(positions, Tensor) or positions.shape[-2:] != (1, 1):
            return None
        if positions.ndim == 3:
            del present["position_ids"]
        tensors = sum(isinstance(value, Tensor) for value in present.values())
        mask = None if self._sees_all(cache, mask) else mask
        is_plain = mask is None or isinstance(mask, Mapping) or getattr(mask, "ndim", 0) == 2
        if tensors != 1 + (positions.ndim == 2) or not is_plain:
            return None
        axes = positions if positions.ndim == 3 else None
        present["past_key_values"] = OwnCache(cache, axes, mask)
        return present

    def _sees_all(self, cache: Cache, mask: Any) -> bool:
        """Whether a text's token attends to all tokens before it; `generate` masks none later."""
        if cache not in self._open:
            masks = mask.values() if isinstance(mask, Mapping) else [mask]
            self._open[cache] = all(map(is_open, masks))
        return self._open[cache]


def reader_of(module: nn.Module) -> PackedTokens | None:
    """The reader of a model's tokens; None for a model whose tokens run alone."""
    decoder = decoder_of(module)
    return None if decoder is None else PackedTokens(decoder, head_of(module))
