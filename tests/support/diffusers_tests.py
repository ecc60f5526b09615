"""Tiny pipelines of diffusers' own tests, from a checkout of its repository.

`DIFFUSERS_CHECKOUT` names the folder. Nothing of it is part of this project: its tests know a tiny
configuration and legal arguments of almost every pipeline, and are imported from there. What they
would fetch from the hub, tokenizers and a few text encoders, is replaced by parts made here.
"""

import copy
import importlib
import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

from support.isolation import build
from support.tiny import parts

FOLDER = os.environ.get("DIFFUSERS_CHECKOUT")


def _letters() -> Any:
    """A tokenizer for BERT, whose words are letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    with tempfile.TemporaryDirectory() as folder:
        words = [*special, *letters, *(f"##{one}" for one in letters)]
        Path(folder, "vocab.txt").write_text("\n".join(words))
        return transformers.BertTokenizer.from_pretrained(folder)


_TOKENIZERS = {  # by a part of the hub's name, the first that fits
    "t5": parts.t5_tokenizer,
    "kandinsky": parts.clip_tokenizer,
    "mclip": parts.t5_tokenizer,
    "clip": parts.clip_tokenizer,
    "roberta": parts.clip_tokenizer,
    "bert": _letters,
    "gpt": parts.clip_tokenizer,
    "qwen": parts.qwen2_tokenizer,
    "smollm": parts.qwen2_tokenizer,
    "gemma": parts.gemma_tokenizer,
    "llama": parts.llama_tokenizer,
    "hunyaun": parts.llama_tokenizer,
    "mistral": parts.llama_tokenizer,
}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "umt5": (transformers.UMT5Config, {"vocab_size": 1200, "d_model": 32, "d_kv": 8, "d_ff": 37}),
    "t5": (transformers.T5Config, {"vocab_size": 1200, "d_model": 32, "d_kv": 8, "d_ff": 37}),
    "bert": (transformers.BertConfig, {**_SMALL, "intermediate_size": 37}),
    "llama": (transformers.LlamaConfig, {**_SMALL, "hidden_size": 16, "intermediate_size": 37}),
    "gemma": (
        transformers.Gemma2Config,
        {**_SMALL, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 37},
    ),
}


@cache
def configurations() -> dict[str, Any]:
    """Diffusers' test classes that know how to build a pipeline and call it, by pipeline class."""
    if FOLDER is None:
        return {}
    _replace_what_is_on_the_hub()
    sys.path.insert(0, FOLDER)
    sys.modules.pop("tests", None)  # as pytest calls ours; diffusers' import each other by it
    found: dict[str, Any] = {}
    for file in sorted(Path(FOLDER, "tests", "pipelines").rglob("test_*.py")):
        name = ".".join(file.relative_to(FOLDER).with_suffix("").parts)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except ImportError:  # of a library that is missing
            continue
        own = [one for one in vars(module).values() if getattr(one, "__module__", "") == name]
        for one in filter(inspect.isclass, own):
            cls = getattr(one, "pipeline_class", None)
            if inspect.isclass(cls):
                bases = [base.__name__ for base in cls.__mro__ if hasattr(diffusers, base.__name__)]
                if hasattr(one, "get_dummy_components") and bases:
                    found.setdefault(bases[0], one)
    for module in [one for name, one in sys.modules.items() if "diffusers.pipelines" in name]:
        if "basic_clean" in vars(module) and "ftfy" not in vars(module):
            vars(module)["ftfy"] = SimpleNamespace(fix_text=str)
    return found


def pipeline(name: str) -> Any:
    """A pipeline with the same weights at every call; layers that begin at zero are drawn."""

    def make() -> Any:
        test = configurations()[name]()
        pipe = test.pipeline_class(**test.get_dummy_components())
        drawn = torch.Generator().manual_seed(7)
        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                for part in component.requires_grad_(False).modules():
                    _draw(part, drawn)
        return pipe

    return build(make)


def _draw(part: nn.Module, generator: torch.Generator) -> None:
    if not isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return
    with torch.no_grad():
        if not part.weight.any():
            part.weight.normal_(std=part.weight[0].numel() ** -0.5, generator=generator)
        if part.bias is not None and not part.bias.any():
            part.bias.normal_(std=0.05, generator=generator)


def requests(name: str) -> list[dict[str, Any]]:
    """Five calls with other steps, guidance and prompts, from the arguments of diffusers' test."""
    test = configurations()[name]()
    takes_device = "device" in inspect.signature(test.get_dummy_inputs).parameters
    given = test.get_dummy_inputs("cpu") if takes_device else test.get_dummy_inputs()
    given.pop("generator", None)
    steps, prompt = given.get("num_inference_steps"), given.get("prompt")
    scale = next((n for n in ("guidance_scale", "true_cfg_scale") if n in given), None)
    other: dict[str, Any] = {}
    longer: dict[str, Any] = {}
    if isinstance(prompt, str):
        other["prompt"] = " ".join(["a", *prompt.split()[1:]])
        longer["prompt"] = f"{prompt} by the sea with a hat"

    def more(count: int) -> dict[str, Any]:
        return {"num_inference_steps": steps + count} if isinstance(steps, int) else {}

    guided, unguided = ({scale: given[scale] + 1.5}, {scale: 1.0}) if scale else ({}, {})
    changes: tuple[dict[str, Any], ...] = (
        {},
        {**more(1), **other},
        guided,
        {**more(2), **unguided, **other},
        {**more(1), **longer},
    )
    return [copy.deepcopy({**given, **one}) for one in changes]


def tensors(value: Any) -> Iterator[Tensor]:
    """All numbers and pictures in an output, in order."""
    if isinstance(value, Tensor):
        yield value.detach().double()
    elif isinstance(value, np.ndarray):
        yield torch.as_tensor(value.astype(np.float64))
    elif isinstance(value, Image.Image):
        yield torch.as_tensor(np.asarray(value).astype(np.float64) / 255)
    elif hasattr(value, "values"):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
    elif hasattr(value, "__dict__"):  # a mesh
        yield from tensors(vars(value))


def _replace_what_is_on_the_hub() -> None:
    """Tokenizers, configs and models by name: parts made here, for the life of the process."""
    tokenizers = transformers.PreTrainedTokenizerBase
    for owner in (tokenizers, transformers.AutoTokenizer):
        _replace(owner, lambda cls, name: _fitting(_TOKENIZERS, name)())
    _replace(transformers.PreTrainedModel, lambda cls, name: cls(_config(name)))
    _replace(transformers.AutoConfig, lambda cls, name: _config(name))


def _replace(owner: Any, make: Any) -> None:
    plain = owner.from_pretrained

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(name).exists():
            return getattr(plain, "__func__", lambda _, *a, **k: plain(*a, **k))(
                cls, name, *args, **kwargs
            )
        return make(cls, str(name).lower())

    owner.from_pretrained = classmethod(from_pretrained)


def _fitting(known: dict[str, Any], name: str) -> Any:
    for part, one in known.items():
        if part in name:
            return one
    raise OSError(f"there is no stand-in for {name}")


def _config(name: str) -> Any:
    cls, given = _fitting(_MODELS, name)
    return cls(**given)
