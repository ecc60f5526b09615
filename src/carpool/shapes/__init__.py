"""The embedded text-to-image model: 64x64 pictures of one or two coloured shapes.

`MODEL_DIR` is an ordinary diffusers folder and loads like any other checkpoint. How it
was made: `draw` makes the data, `train` the weights, `judge` says what a picture shows.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"

VIDEO_MODEL_DIR = Path(__file__).parent / "video" / "model"
"""The embedded text-to-video model, made by `carpool.shapes.video`."""

LORA_DIR = Path(__file__).parent / "lora"
"""Adapters of the embedded model: `NAME.safetensors`, registered as NAME with it."""
