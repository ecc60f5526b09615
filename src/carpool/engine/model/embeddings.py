"""Textual inversion: custom words, each learned as vectors of the text encoders.

A file is one word, named like the file: `mystyle.safetensors` is "mystyle" in a prompt; a file of
diffusers also is the word in it. The words are added once, when the model is loaded; prompts
without them do not change.
"""

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import TextualInversionLoaderMixin
from safetensors.torch import load_file

from carpool.errors import LoadFailed, SettingRejected

log = logging.getLogger("carpool")

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_KEYS = {"", "*", "emb_params"}  # keys of vectors that are no words
_PLACES = {"clip_l": "", "clip_g": "_2"}  # suffix of the text encoder, by key in SDXL's files


def add_embeddings(pipe: Any, folder: str) -> dict[str, int]:
    """Add the words of a folder's files; a file that does not fit is left out, with a warning.

    Returns:
        The words, with the number of vectors of each.

    Raises:
        SettingRejected: there is no such folder.
        LoadFailed: the pipeline does not support embeddings.
    """
    if not Path(folder).expanduser().is_dir():
        raise SettingRejected(f"embeddings={folder!r}: there is no such folder")
    if not isinstance(pipe, TextualInversionLoaderMixin):
        raise LoadFailed(
            f"embeddings={folder!r}: {type(pipe).__name__} reads no embeddings (textual "
            "inversion); pipelines of SD 1.5, SD 2, SDXL and FLUX.1 do"
        )
    words = dict[str, int]()
    for path in sorted(Path(folder).expanduser().rglob("*")):
        if path.suffix.lower() not in SUFFIXES:
            continue
        try:
            vectors = _vectors(path)
            for word in _words(path.stem, vectors):
                _add(pipe, word, vectors)
                words[word] = max(len(tensor) for tensor in vectors.values())
        except pickle.UnpicklingError:
            rule = "it is no file of plain tensors, and others can run code: take a .safetensors"
            log.warning("embedding %s is left out: %s", path.name, rule)
        except Exception as error:  # third-party files may raise anything
            log.warning("embedding %s is left out: %s", path.name, str(error).partition("\n")[0])
    log.info("%d embeddings: %s", len(words), ", ".join(words))
    return words


def _vectors(path: Path) -> dict[str, torch.Tensor]:
    """The vectors of a file by key; a known key names their text encoder."""
    safe = path.suffix.lower() == ".safetensors"
    content = load_file(path) if safe else torch.load(path, "cpu", weights_only=True)
    if isinstance(content, Mapping) and "string_to_param" in content:  # AUTOMATIC1111's format
        content = content["string_to_param"]
    if isinstance(content, torch.Tensor):
        content = {"": content}
    vectors = {
        name: value.detach().reshape(-1, value.shape[-1])
        for name, value in content.items()
        if isinstance(value, torch.Tensor) and value.numel() and value.ndim
    }
    for name, tensor in vectors.items():
        if not (tensor.is_floating_point() and tensor.isfinite().all()):
            raise ValueError(f"{name or 'its tensor'} has values that are no finite numbers")
    if not vectors or (len(vectors) > 1 and not vectors.keys() <= _PLACES.keys()):
        keys = ", ".join(map(str, content)) or "nothing"
        raise ValueError(f"it holds {keys}: one tensor is expected, or clip_l and clip_g")
    return vectors


def _words(stem: str, vectors: Mapping[str, torch.Tensor]) -> list[str]:
    """The words of a file: its name, and the token in it, as diffusers' scripts write it."""
    tokens = vectors.keys() - _KEYS - _PLACES.keys()
    if stem.startswith("learned_embeds") and tokens:
        return list(tokens)
    return [*(token for token in tokens if token.startswith("<") and token != stem), stem]


def _add(pipe: Any, word: str, vectors: Mapping[str, torch.Tensor]) -> None:
    """Add a word to each text encoder that its vectors are for; on an error to none."""
    places = list[tuple[Any, Any, torch.Tensor]]()
    for name, tensor in vectors.items():
        suffixes = [_PLACES[name]] if name in _PLACES else ["", "_2"]
        encoders = [(suffix, getattr(pipe, f"text_encoder{suffix}", None)) for suffix in suffixes]
        widths = {s: e.get_input_embeddings().weight.shape[1] for s, e in encoders if e is not None}
        suffix = next((suffix for suffix in widths if widths[suffix] == tensor.shape[1]), None)
        if suffix is None:
            raise ValueError(
                f"its vectors are {tensor.shape[1]} wide, and the text encoder's "
                f"{' or '.join(map(str, widths.values())) or 'are none'}: it is of another model"
            )
        tokenizer = getattr(pipe, f"tokenizer{suffix}")
        if {word, f"{word.lower()}</w>"} & tokenizer.get_vocab().keys():
            raise ValueError(f"{word!r} is a word already: rename the file")
        places.append((tokenizer, getattr(pipe, f"text_encoder{suffix}"), tensor))
    for tokenizer, encoder, tensor in places:
        pipe.load_textual_inversion(tensor, token=word, tokenizer=tokenizer, text_encoder=encoder)
