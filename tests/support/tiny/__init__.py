"""Tiny random checkpoints of real pipelines: `checkpoint("flux")` is a folder to load."""

from support.tiny.checkpoints import ARGUMENTS, FAMILIES, checkpoint, tiny_pipeline

__all__ = ["ARGUMENTS", "FAMILIES", "checkpoint", "tiny_pipeline"]
