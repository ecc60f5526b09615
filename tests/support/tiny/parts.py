"""Parts of tiny checkpoints: how weights are drawn, tokenizers, and what is made of a recipe.

The weights are random but not as the libraries draw them: those leave layers at zero
and signals so faint that a lost prompt goes unnoticed. `drawn` gives every weight the
size that keeps its signal near one, so each argument of a call shows in the image.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import torch
import transformers
from torch import nn

from support.tiny.recipes import resolved

TOKENIZERS = Path(__file__).parent / "tokenizers"

M = TypeVar("M", bound=nn.Module)


def drawn(module: M, *, last: str | None = None, gain: float = 1.0) -> M:
    """Redraw the weights of `module` in place so that every signal stays near one.

    Matrices and kernels get a standard deviation of 1/sqrt(inputs), embeddings of 1.0,
    biases of 0.1; statistics of latents and of batch norms are no longer neutral. Every
    other parameter stays as its library drew it.

    Args:
        module: any model, or a part of one.
        last: the path of its output layer, to be multiplied by `gain`: below one for
            pixels, which are clamped to -1..1, and for denoisers, whose rounding errors
            (1e-6 for outputs near one) would grow from step to step.
        gain: the factor for `last`.
    """
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.weight.normal_()
            elif isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                part.weight.normal_(std=part.weight[0].numel() ** -0.5)
                if part.bias is not None:
                    part.bias.normal_(std=0.1)
            elif isinstance(part, nn.ConvTranspose1d):
                taps = part.kernel_size[0] / part.stride[0]  # that reach each sample
                part.weight.normal_(std=(taps * part.in_channels) ** -0.5)
            elif isinstance(part, nn.BatchNorm2d):
                part.get_buffer("running_mean").normal_(std=0.2)
                part.get_buffer("running_var").uniform_(0.5, 1.5)
        for name, parameter in module.named_parameters():
            if name.endswith("pad_token"):  # zeros at first, and they are attended
                parameter.normal_()
        for name, buffer in module.named_buffers():
            if name in ("latents_mean", "latents_std"):
                low, high = (-0.5, 0.5) if name == "latents_mean" else (0.8, 1.2)
                buffer.copy_(torch.linspace(low, high, len(buffer)))
    return module if last is None else scaled(module, {last: gain})


def scaled(module: M, gains: Mapping[str, float]) -> M:
    """Multiply the parameters of some layers in place.

    Args:
        module: any model.
        gains: factors by layers' paths. `*norm_q` are the normed queries: where nothing but
            attention carries the text into the picture, an even look at all tokens leaves of a
            prompt only a mean that is much the same for any; three times sharper, it does not.
    """
    with torch.no_grad():
        for pattern, factor in gains.items():
            layers = [part for path, part in module.named_modules() if fnmatch(path, pattern)]
            assert layers, pattern
            for layer in layers:
                for parameter in layer.parameters():
                    parameter.mul_(factor)
    return module


def part(recipe: Any) -> Any:
    """Make a part of a pipeline of its recipe; a setting is given back as it is."""
    from support.tiny import builders  # some of them are made of parts

    if not isinstance(recipe, str | list):
        return recipe
    name, config, gains = resolved(recipe)
    builder = vars(builders).get(name)
    if builder is not None:
        return builder(**config)
    module, _, short = name.rpartition(":")
    exported: Any = getattr(diffusers, name, None) or getattr(transformers, name, None)
    cls = getattr(import_module(module), short) if module else exported
    built = cls(cls.config_class(**config)) if hasattr(cls, "config_class") else cls(**config)
    return scaled(drawn(built), gains) if isinstance(built, nn.Module) else built


def _tokenizer(cls: Any, name: str, **options: Any) -> Any:
    return cls.from_pretrained(TOKENIZERS / name, **options)


clip_tokenizer = partial(_tokenizer, transformers.CLIPTokenizer, "clip")
t5_tokenizer = partial(_tokenizer, transformers.T5TokenizerFast, "t5")
gemma_tokenizer = partial(_tokenizer, transformers.GemmaTokenizer, "gemma")
llama_tokenizer = partial(_tokenizer, transformers.LlamaTokenizer, "llama")
qwen2_tokenizer = partial(_tokenizer, transformers.Qwen2Tokenizer, "qwen2")  # has a chat template
