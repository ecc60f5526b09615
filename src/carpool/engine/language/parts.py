"""Which modules of a component that generates are called by its `generate`, token by token.

`generate` stays that of its library and runs in the request's fiber. What it calls is heavy: the
component's own `forward`, once for the prompt and once for each token, and, where a class has a
`generate` of its own, its parts: an encoder of pictures or of the text to be continued, a language
model inside. These park while the component generates.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from carpool.engine.specs.rules import Spec

WRITING = ("generate", "logits")  # names of methods under which texts are written
LARGE_HEAD = 2**22  # weights
_UNCALLED = nn.Module.forward  # of lists and other containers, which are never called themselves


class TokenReader(Protocol):
    """Reads the calls of a language model: which are of one token of one text, and can be packed.

    Attributes:
        decoder: its layers.
        head: makes logits of what they give; None: that takes no time.
        specs: how calls of the decoder fuse, by the argument that has the token.
        of_head: how those of the head do.
    """

    decoder: nn.Module
    head: nn.Module | None
    specs: Mapping[str, Spec]
    of_head: Spec

    def is_token(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call of the whole model is of one token of one text."""
        ...

    def packable(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a decoder's call as `specs` has them; None if it runs alone."""
        ...

    def run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The decoder's forward, as `specs` calls it."""
        ...


def called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost parts of a module that can be called, and are more than a layer of torch."""
    for child in module.children():
        if isinstance(child, (nn.Linear, nn.Embedding)):
            continue
        if type(child).forward is _UNCALLED or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from called_parts(child)
        else:
            yield child


def decoder_of(module: nn.Module) -> nn.Module | None:
    """The layers of a language model that run for each token; None where they cannot be packed.

    They are the innermost part that takes embeddings, places, and a cache of keys and values, in a
    model whose attention goes through the registry of transformers.
    """
    if getattr(getattr(module, "config", None), "is_encoder_decoder", True):
        return None
    takers = [part for part in module.modules() if _parameters(part) >= _TAKES]
    inner = [part for part in takers if sum(x in takers for x in part.modules()) == 1]
    if len(inner) != 1 or inner[0] is module:
        return None
    is_compiled = any(vars(part).get("_compiled_call_impl") for part in module.modules())
    is_registered = getattr(inner[0], "_supports_attention_backend", False)
    return inner[0] if is_registered and not is_compiled else None


def head_of(module: nn.Module) -> nn.Module | None:
    """The layer that makes logits, where it is large enough to be worth a forward of its own."""
    find = getattr(module, "get_output_embeddings", None)
    head = find() if callable(find) else None
    is_large = isinstance(head, nn.Linear) and head.weight.numel() >= LARGE_HEAD
    return head if is_large else None


_TAKES = {"inputs_embeds", "position_ids", "past_key_values"}


def _parameters(part: nn.Module) -> set[str]:
    return set(inspect.signature(type(part).forward).parameters)
