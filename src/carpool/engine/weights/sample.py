"""Identify weights by a digest of a few values of each."""

import hashlib

import torch
from torch import Tensor, nn

from carpool.engine.weights.groups import plain_parts

_SAMPLES = 8  # values of each plain tensor of a weight


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
