"""Tell weights apart: a digest of a few values of each."""

import hashlib

from torch import nn

_SAMPLES = 8  # values of each weight


def sample(module: nn.Module) -> bytes:
    """A digest of some values of each weight."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in module.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        if type(weight) is nn.Parameter and weight.device.type != "meta" and weight.numel():
            try:
                step = max(1, weight.numel() // _SAMPLES)
                some = weight.detach().flatten()[::step][:_SAMPLES].float().tolist()
            except (RuntimeError, NotImplementedError):
                continue  # quantized
            digest.update(repr(some).encode())
    return digest.digest()
