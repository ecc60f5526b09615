"""CLIP's text encoders under the names by which diffusers calls their parts.

With `clip_skip`, pipelines of Stable Diffusion 1 call `text_encoder.text_model.final_layer_norm`.
Transformers 5 has no `text_model` any more: its parts are in the encoder itself.
"""

from collections.abc import Iterable

from torch import nn
from transformers import CLIPTextModel

ALIAS = "text_model"


class FlattenedEncoders:
    """The encoders of one engine that lack the alias. Use them on the engine's thread."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        encoders = [module for module in modules if isinstance(module, CLIPTextModel)]
        self._modules = [encoder for encoder in encoders if not hasattr(encoder, ALIAS)]

    def install(self) -> None:
        for module in self._modules:
            vars(module)[ALIAS] = module  # not as a submodule: names of weights must not change

    def remove(self) -> None:
        """Remove the alias from every encoder. Harmless when not installed."""
        for module in self._modules:
            vars(module).pop(ALIAS, None)
