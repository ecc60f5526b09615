"""Tiny random checkpoints of real pipelines: `checkpoint("flux")` is a folder to load."""

from support.tiny.checkpoints import ARGUMENTS, FAMILIES, checkpoint

__all__ = ["ARGUMENTS", "FAMILIES", "checkpoint"]
