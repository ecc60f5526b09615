"""CLIP's text encoders under the names by which diffusers calls their parts.

With `clip_skip`, pipelines of Stable Diffusion 1 call `text_encoder.text_model.final_layer_norm`.
Transformers 5 has no `text_model` any more: its parts are in the encoder itself.
"""

from collections.abc import Iterable
from contextlib import ExitStack

from torch import nn
from transformers import CLIPTextModel

ALIAS = "text_model"


def add_aliases(modules: Iterable[nn.Module], undo: ExitStack) -> None:
    """Add the alias to the encoders that lack it, until `undo`."""
    for module in modules:
        if isinstance(module, CLIPTextModel) and not hasattr(module, ALIAS):
            vars(module)[ALIAS] = module  # not as a submodule: names of weights must not change
            undo.callback(vars(module).pop, ALIAS, None)
