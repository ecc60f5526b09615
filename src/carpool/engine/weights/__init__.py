"""Weights: resident on the device, or streamed to it in groups of blocks."""
