"""Folders of the embedded models: normal diffusers checkpoints, made by `training/shapes`."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "shapes"
"""Text to image: 64x64 pictures of one or two coloured shapes."""

VIDEO_MODEL_DIR = Path(__file__).parent / "shapes_video"
"""Text to video: the same shapes, moving."""

LORA_DIR = Path(__file__).parent / "shapes_lora"
"""Adapters of the embedded model: `NAME.safetensors`, registered as NAME."""

REWRITER_DIR = Path(__file__).parent / "shapes_rewriter"
"""Text to text: rewrites free wordings to captions that the embedded models know."""
