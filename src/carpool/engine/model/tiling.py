"""Run an autoencoder in tiles, for a call that does not fit the memory as a whole."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def can_tile(module: nn.Module) -> bool:
    """Whether an autoencoder works in tiles if it is asked to, and does not yet."""
    return hasattr(module, "enable_tiling") and getattr(module, "use_tiling", None) is False


@contextmanager
def tiles(module: nn.Module) -> Iterator[None]:
    """Let an autoencoder work in tiles inside of the block."""
    enable = getattr(module, "enable_tiling")  # noqa: B009 - not of every module
    enable()
    try:
        yield
    finally:
        module.use_tiling = False  # type: ignore[assignment]
