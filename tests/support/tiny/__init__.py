"""Tiny random checkpoints of real pipelines: `checkpoint("flux")` is a folder to load."""

from support.tiny.checkpoints import ARGUMENTS, checkpoint, tiny_pipeline
from support.tiny.recipes import FAMILIES

__all__ = ["ARGUMENTS", "FAMILIES", "checkpoint", "tiny_pipeline"]
