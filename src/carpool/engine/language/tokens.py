"""Find calls of language models that share forwards with other texts' calls: tokens, prompts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.cache_utils import Cache

from carpool.engine.language.own_cache import OwnCache, by_row, can_pack, is_open, is_plain
from carpool.engine.language.packed import HEAD, SPECS, Decoder
from carpool.engine.language.parts import decoder_of, head_of, unscaled_length
from carpool.engine.language.prompt import PromptReading, prompt_of


class PackedTokens:
    """Reads the calls of a language model: finds those that can be packed.

    Args:
        decoder: the layers of the model.
        head: computes logits from the decoder's output; None: it is too small to matter.
        packs_prompts: prompts share forwards.
    """

    specs, of_head = SPECS, HEAD  # how their calls fuse

    def __init__(
        self, decoder: nn.Module, head: nn.Module | None, *, packs_prompts: bool = True
    ) -> None:
        self.decoder, self.head, self.packs_prompts = decoder, head, packs_prompts
        self._below = unscaled_length(decoder)
        self._open: WeakKeyDictionary[Cache, bool] = WeakKeyDictionary()  # texts without padding
        self._prompts: WeakKeyDictionary[Cache, PromptReading] = WeakKeyDictionary()

    def run(self, original: Callable[..., Any]) -> Decoder:
        """The decoder's forward for calls in the form of `SPECS`."""
        return Decoder(self.decoder, original)

    @contextmanager
    def reading(self, module: nn.Module, arguments: Mapping[str, Any]) -> Iterator[Any]:
        """The prompt of a whole model's call, while it is prefilled; None: it runs in one call."""
        if (prompt := prompt_of(module, arguments, self._below)) is not None:
            self._prompts[prompt.cache] = prompt
        try:
            yield prompt
        finally:
            if prompt is not None:
                del self._prompts[prompt.cache]

    def prompt_in(self, arguments: Mapping[str, Any]) -> PromptReading | None:
        """The prompt that a call prefills in part."""
        cache = arguments.get("past_key_values")
        return self._prompts.get(cache) if isinstance(cache, Cache) else None

    def parks_inside(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call of a whole model is for one token, or a part of a prompt, of one text."""
        ids, cache = arguments.get("input_ids"), arguments.get("past_key_values")
        is_single = isinstance(ids, Tensor) and ids.shape == (1, 1)
        return (is_single and can_pack(cache, self._below)) or self.prompt_in(arguments) is not None

    def packable(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a decoder's call in the form of `SPECS`; None if it runs alone."""
        present = {name: value for name, value in arguments.items() if value is not None}
        cache, mask = present.pop("past_key_values", None), present.pop("attention_mask", None)
        positions, prompt = present.get("position_ids"), self.prompt_in(arguments)
        leads = [name for name in ("input_ids", "inputs_embeds") if name in present]
        if len(leads) != 1 or not (can_pack(cache, self._below) or (prompt and is_plain(cache))):
            return None
        tokens = present[leads[0]].shape[1] if prompt else 1
        if not isinstance(positions, Tensor) or positions.shape[-2:] != (1, tokens):
            return None
        if positions.ndim == 3:
            del present["position_ids"]
        names = [name for name, value in present.items() if isinstance(value, Tensor)]
        is_known = SPECS[leads[0]].rules.keys() >= set(names)
        if not is_known or any(present[name].shape[:2] != (1, tokens) for name in names):
            return None
        if prompt is None and self._sees_all(cache, mask):
            mask = None
        if not isinstance(mask, Mapping | None):
            if getattr(mask, "ndim", 0) != 2:
                return None
            mask = mask if prompt is None else None  # a prompt's mask hides nothing
        if tokens > 1:
            present |= {name: by_row(present[name]) for name in names}
        axes = positions.transpose(1, 2) if positions.ndim == 3 else None
        present["past_key_values"] = OwnCache(cache, tokens, axes, mask, prompt)
        return present

    def _sees_all(self, cache: Cache, mask: Any) -> bool:
        """Whether a text's token attends to all tokens before it; `generate` masks none later."""
        if cache not in self._open:
            masks = mask.values() if isinstance(mask, Mapping) else [mask]
            self._open[cache] = all(map(is_open, masks))
        return self._open[cache]


def reader_of(module: nn.Module, *, is_exact: bool = False) -> PackedTokens | None:
    """The reader of a model's calls; None for a model whose calls run alone."""
    if (decoder := decoder_of(module)) is None:
        return None
    return PackedTokens(decoder, head_of(module), packs_prompts=not is_exact)
