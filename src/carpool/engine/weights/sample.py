"""Identify weights by a digest of a few values of each, and files by one of a few pieces."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from carpool.engine.weights.groups import plain_parts

_SAMPLES = 8  # values of each plain tensor of a weight
_PIECE, _PIECES = 16 << 10, 256  # sampled pieces: bytes of each, and their approximate number


def digest_of(file: Path) -> str:
    """A digest of a file's size and of sampled pieces; of all bytes up to 4 MiB."""
    size = file.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with file.open("rb") as opened:
        for begin in range(0, size, max(_PIECE, size // _PIECES)):
            opened.seek(begin)
            digest.update(opened.read(_PIECE))
    return digest.hexdigest()


def sample(module: nn.Module) -> bytes:
    """A digest of some values of each weight."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in module.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        for _, attribute, part in plain_parts(weight, "data", weight):
            digest.update(f"{attribute}{tuple(part.shape)}{_values(part)}".encode())
    return digest.digest()


def _values(part: Tensor) -> list[float]:
    if part.is_meta or not part.numel():
        return []
    plain = part.detach().as_subclass(torch.Tensor)  # GGUF: the raw bytes
    step = max(1, plain.numel() // _SAMPLES)
    try:
        values: list[float] = plain.flatten()[::step][:_SAMPLES].float().tolist()
    except (RuntimeError, NotImplementedError):
        return []  # values that torch cannot convert
    return values
