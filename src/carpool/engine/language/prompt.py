"""Prefill of a prompt in parts, after its cached prefix.

Prefilling a long prompt takes longer than a denoising step. So it is split into parts, each a call
of the decoder that appends to the text's cache; other requests' forwards run in between, and parts
of several prompts share a forward. A prefix shared by several prompts is computed once: see
`prefixes.py`. Keys and values differ in the last bits from those of one prefill, so exact numerics
does none of this.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from carpool.engine.foreign_code import is_of_a_library
from carpool.engine.language.own_cache import LAYERS, OwnCache, is_open, is_plain, layers_of
from carpool.engine.language.parts import linear_parts

_BY_TOKEN = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids")
_ARGUMENTS = {*_BY_TOKEN, "attention_mask", "past_key_values", "use_cache", "return_dict",
              "logits_to_keep"}  # fmt: skip


class PromptReading:
    """The prefill of one prompt without pictures, under causal attention without a window.

    Attributes:
        module: the language model.
        by_token: arguments with an entry for each token on the last axis.
        tokens: length of the prompt.
        until: end of the part that is being prefilled.
        marks: digests of its prefixes, see `prefixes.py`; None: not computed.
    """

    marks: list[bytes] | None = None

    def __init__(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        self.module, self._arguments = module, dict(arguments)
        self.cache: DynamicCache = self._arguments.pop("past_key_values")
        self._mask: Tensor | None = self._arguments.pop("attention_mask", None)
        names = [name for name in _BY_TOKEN if name in self._arguments]
        self.by_token: dict[str, Tensor] = {name: self._arguments.pop(name) for name in names}
        self.until = self.tokens = self.by_token["input_ids"].shape[1]

    @property
    def read(self) -> int:
        """Number of tokens whose keys and values are in the cache."""
        return int(self.cache.get_seq_length())

    @property
    def is_last(self) -> bool:
        """Whether the part ends the prompt."""
        return self.until == self.tokens

    def part(self) -> dict[str, Any]:
        """The model's arguments for the tokens after the cached ones, up to `until`."""
        self._before = OwnCache(self.cache)
        part = {name: value[..., self.read : self.until] for name, value in self.by_token.items()}
        mask = None if self._mask is None else self._mask[:, : self.until]
        return {**part, "attention_mask": mask, "past_key_values": self.cache, **self._arguments}

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the part, perhaps again: tokens that a failed forward has cached are dropped."""
        self._before.rewound()
        return forward(*args, **kwargs)

    def fill(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        """Add keys and values of the next tokens, (1, heads, tokens, width) for each layer."""
        for layer, (keys, values) in zip(layers_of(self.cache), layers, strict=True):
            layer.update(keys, values)


def prompt_of(
    module: nn.Module, arguments: Mapping[str, Any], below: float
) -> PromptReading | None:
    """The prompt of a model's call; None: it runs in one forward, as from `below` tokens on."""
    present = {n: v for n, v in arguments.items() if v is not None and v is not False}
    present = {n: v for n, v in present.items() if not isinstance(v, dict) or v}
    names = "input_ids", "attention_mask", "past_key_values", "logits_to_keep"
    ids, mask, cache, keeps = (cast("Any", present.get(name)) for name in names)
    if not isinstance(keeps, int) or keeps != 1:
        return None  # not `generate`, which needs only the last token's logits
    if present.keys() - _ARGUMENTS or module.training:
        return None  # other inputs than text, or dropout
    if not (is_plain(cache) or _is_hybrid(module, cache)) or cache.get_seq_length():
        return None  # it cannot be continued, or continues an earlier text
    columns = [present[name] for name in _BY_TOKEN if name in present]
    are_tensors = all(isinstance(value, Tensor) for value in (ids, *columns))
    if not are_tensors or ids.shape[:-1] != (1,) or not 0 < (tokens := ids.shape[1]) < below:
        return None
    is_whole = is_open(mask) and getattr(mask, "shape", ids.shape) == ids.shape
    if not is_whole or any(value.shape[-1:] != (tokens,) for value in columns):
        return None
    if any(present[name].any() for name in _BY_TOKEN[2:] if name in present):
        return None  # picture tokens may attend to later ones
    loop = getattr(type(module), "generate", None)
    is_usual = loop is GenerationMixin.generate and is_of_a_library(type(module))
    return PromptReading(module, present) if is_usual else None


def _is_hybrid(module: nn.Module, cache: Any) -> bool:
    """Whether linear attention, of a kind that continues a text by any length, is part of it."""
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    kinds = [type(layer) for layer in cache.layers]
    linear = kinds.count(LinearAttentionLayer)
    return 0 < linear == linear_parts(module) and {*kinds} <= {*LAYERS, LinearAttentionLayer}
