"""One forward for tokens of several texts, of prompts or in progress: one row per token.

Linear layers see all rows. Attention runs per text, over its own keys and values, of its own
length, by the function that the model would use alone. That function, and its masks, are installed
through the public registries of transformers.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from carpool.engine.language.own_cache import OwnCache, PackedCache, by_row
from carpool.engine.specs.rules import STACK, Spec, State

NAME = "carpool_packed"  # name of a packed forward's attention

_running: ContextVar[PackedCache] = ContextVar("_running")

SPECS = {
    rows: Spec(
        rules={
            rows: STACK,
            "position_ids": STACK,
            "past_key_values": State(
                state_key=lambda cache: cache.form, joined=list, copied=OwnCache.copied
            ),
        },
        unread=("past_key_values",),
    )
    for rows in ("input_ids", "inputs_embeds")
}
"""The tables for a decoder's calls, by the argument with its tokens."""

HEAD = Spec(rows="input", rules={"input": STACK})


class Decoder:
    """Runs the layers of a language model for tokens of one or several texts.

    Args:
        original: the module's forward.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self._module, self._original = module, original
        self._config: Any = module.config
        configs = {id(c): c for part in module.modules() if (c := getattr(part, "config", None))}
        self._configs = list(configs.values())
        self._latent: list[Any] = [x for x in module.modules() if hasattr(type(x), "expand_kv")]

    def __call__(self, *, past_key_values: Any, **arguments: Any) -> Any:
        parts = past_key_values if isinstance(past_key_values, list) else [past_key_values]
        if parts[0].positions is not None:
            arguments["position_ids"] = torch.cat([part.positions for part in parts], dim=1)
        if len(parts) == 1:
            if parts[0].tokens > 1:
                arguments = {name: _by_text(value) for name, value in arguments.items()}
            cache, mask = parts[0].rewound(), parts[0].mask
            answer = self._original(past_key_values=cache, attention_mask=mask, **arguments)
            fields = {name: field for name, field in answer.items() if name != "past_key_values"}
            return type(answer)(**fields)
        pads = not (self._latent or torch._C._len_torch_function_stack())  # that: exact numerics
        packed = PackedCache(parts, self._config._attn_implementation, pads=pads)
        if isinstance(kinds := packed.masks[0], Mapping):
            arguments["attention_mask"] = {n: [mask[n] for mask in packed.masks] for n in kinds}
        with self._packing(packed, has_axes=parts[0].positions is not None):
            answer = self._original(past_key_values=packed, **arguments)
        answer.past_key_values = None  # each text has its own
        return answer

    @contextmanager
    def _packing(self, packed: PackedCache, *, has_axes: bool) -> Iterator[None]:
        before = [config._attn_implementation_internal for config in self._configs]
        token = _running.set(packed)
        with ExitStack() as undo:
            undo.callback(_running.reset, token)
            for config, implementation in zip(self._configs, before, strict=True):
                undo.callback(setattr, config, "_attn_implementation_internal", implementation)
                config._attn_implementation_internal = NAME
            for part in self._latent:
                undo.callback(delattr, part, "expand_kv")
                vars(part)["expand_kv"] = partial(_expanded, part.expand_kv)
            if has_axes and torch._C._len_torch_function_stack():  # exact numerics
                undo.enter_context(_rotating_by_row(self._module))
            yield


def _expanded(expand: Callable[..., Any], latents: Any, rotated: Any) -> Any:
    """Keys and values of each text, of latents in its cache, as DeepSeek's layers make them."""
    with torch._C.DisableTorchFunction():  # each row already runs as alone
        return tuple(zip(*map(expand, latents, rotated), strict=True))


def _by_text(value: Any) -> Any:
    """An argument of a single call, with its tokens on the axis where the model has them."""
    if not isinstance(value, Tensor):
        return value
    return value.transpose(1, 2) if value.shape[1] > 1 else by_row(value)


@contextmanager
def _rotating_by_row(decoder: nn.Module) -> Iterator[None]:
    """Compute rotary angles row by row, as alone: their positions have rows on a later axis."""
    rotary: Any = decoder.rotary_emb
    whole = rotary.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        with torch._C.DisableTorchFunction():  # three axes are not three rows
            rows = zip(torch.split(x, 1), torch.split(position_ids, 1, dim=1), strict=True)
            parts = zip(*[whole(*row) for row in rows], strict=True)
            return tuple([torch.cat(part, dim=part[0].ndim - 3) for part in parts])

    vars(rotary)["forward"] = forward
    try:
        yield
    finally:
        del vars(rotary)["forward"]


def _attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of each text by itself, as the model computes it alone."""
    names = vars(sys.modules[type(module).__module__])
    interface = names.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    eager, packed = names.get("eager_attention_forward"), _running.get()
    alone = interface.get_interface(packed.implementation, eager)
    kwargs.pop("position_ids", None)  # meant for packed sequences, not for single tokens
    if isinstance(key, Tensor) and attention_mask is None and packed.visible() is not None:
        key, value = packed.own(key), packed.own(value)  # the model itself makes no mask
    if isinstance(key, Tensor):
        return by_row(alone(module, query, key, value, attention_mask, **kwargs)[0]), None
    masks = attention_mask if isinstance(attention_mask, list) else [attention_mask] * len(key)
    with torch._C.DisableTorchFunction():  # each row already runs as alone
        texts = zip(packed.split(query), key, value, masks, strict=True)
        answer = torch.cat([by_row(alone(module, *text, **kwargs)[0]) for text in texts])
    for name, mark in vars(query).items():  # marks of exact numerics: the rows are the same
        if name.startswith("_rows_"):
            setattr(answer, name, mark)
    return answer, None


def _mask(**kwargs: Any) -> Any:
    """The masks of all texts, as alone, or of padded rows; None if no text needs one."""
    packed = _running.get()
    alone, masks = ALL_MASK_ATTENTION_FUNCTIONS[packed.implementation], []
    if packed.side_by_side(packed.layer):
        if (visible := packed.visible()) is None:
            return None
        texts, length = visible.shape
        rows = {"batch_size": texts, "q_length": 1, "kv_length": length, "kv_offset": 0}
        return alone(**{**kwargs, **rows, "q_offset": length - 1, "attention_mask": visible})
    for cache, mask, tokens in zip(packed.caches, packed.masks, packed.tokens, strict=True):
        length, offset = cache.get_mask_sizes(tokens, packed.layer)
        single = {
            "batch_size": 1,
            "q_length": tokens,
            "kv_length": length,
            "kv_offset": offset,
            "q_offset": cache.get_query_offset(packed.layer),
            "attention_mask": None if mask is None else mask.to(kwargs["device"], torch.bool),
        }
        masks.append(alone(**{**kwargs, **single}))
    return None if all(mask is None for mask in masks) else masks


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
