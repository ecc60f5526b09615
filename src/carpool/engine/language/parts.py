"""Find the modules of a text generator that its `generate` calls, token by token.

`generate` itself is the library's, and runs in the request's fiber. Its calls are heavy: the
component's own `forward`, once for the prompt and once for each token, and, in classes with their
own `generate`, its parts: an encoder of images or of the text to continue, an inner language
model. These park while the component generates.
"""

import inspect
import re
from collections.abc import Iterator
from math import inf

from torch import nn

BLOCK = 16  # tokens for each row of `max_batch_size`; half: narrower prefills, twice the digests
PREFILL = "prefill"  # the method for a part of a prompt before the last one
WRITING = ("generate", PREFILL, "logits")  # methods that generate text
LARGE_HEAD = 2**22  # weights
_UNCALLED = nn.Module.forward  # containers have this forward, and are never called themselves


class PartRead(Exception):
    """Ends a model's forward after its decoder: the part of a prompt before the last has no use of
    logits."""


def called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost callable parts of a module, except single torch layers."""
    for child in module.children():
        if type(child).forward is _UNCALLED or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from called_parts(child)
        elif not isinstance(child, (nn.Linear, nn.Embedding)):
            yield child


def towers_of(module: nn.Module) -> list[nn.Module]:
    """The encoders of texts, pictures and sound, which `generate` runs before the first token."""
    from transformers import PreTrainedModel  # takes a second to import

    if not isinstance(module, PreTrainedModel):
        return []
    towers = dict.fromkeys(module.get_encoder(kind) for kind in (None, "image", "video", "audio"))
    return [tower for tower in towers if tower is not module]


def decoder_of(module: nn.Module) -> nn.Module | None:
    """The layers of a language model that run for each token; None if they cannot be packed.

    They are the innermost part that takes embeddings, positions, and a key-value cache, in a model
    whose attention goes through the registry of transformers.
    """
    if getattr(getattr(module, "config", None), "is_encoder_decoder", True):
        return None
    signatures = [(part, inspect.signature(type(part).forward)) for part in module.modules()]
    takers = [part for part, signature in signatures if signature.parameters.keys() >= _TAKES]
    inner = [part for part in takers if sum(x in takers for x in part.modules()) == 1]
    if len(inner) != 1 or inner[0] is module:
        return None
    is_compiled = any(vars(part).get("_compiled_call_impl") for part in module.modules())
    is_registered = getattr(inner[0], "_supports_attention_backend", False)
    return inner[0] if (is_registered or linear_parts(module)) and not is_compiled else None


def linear_parts(module: nn.Module) -> int:
    """The number of layers of linear attention that continue a text by any number of tokens."""
    return sum(type(part).__name__ in _CONTINUED for part in module.modules())


def unscaled_length(module: nn.Module) -> float:
    """The length below which a text's rotary angles do not depend on its length; inf: any."""
    rotary = [part for part in module.modules() if _SCALED.search(str(vars(part).get("rope_type")))]
    configs = str([vars(part)["config"].to_dict() for part in rotary])
    return min(map(int, re.findall(r"max_position_embeddings': (\d+)", configs)), default=inf)


def head_of(module: nn.Module) -> nn.Module | None:
    """The layer that computes logits, if it is large enough for a separate forward."""
    find = getattr(module, "get_output_embeddings", None)
    head = find() if callable(find) else None
    is_large = isinstance(head, nn.Linear) and head.weight.numel() >= LARGE_HEAD
    return head if is_large else None


_CONTINUED = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet")
_SCALED = re.compile("dynamic|longrope")  # kinds of rotary angles
_TAKES = {"inputs_embeds", "position_ids", "past_key_values"}
