"""Plain diffusers with the embedded model, for the other servers: no engine code.

Both servers answer `POST /v1/images/generations` with the fields that the load client reads, so all
parties do the same work: the pipeline, a PNG, base64.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from pydantic import BaseModel

from carpool.models.embedded import MODEL_DIR

DEFAULTS: dict[str, Any] = {"width": 64, "height": 64, "max_sequence_length": 16}


class Body(BaseModel):
    """A request of the benchmark."""

    prompt: str
    seed: int
    num_inference_steps: int
    guidance_scale: float

    @property
    def settings(self) -> tuple[int, float]:
        """The settings that all pictures of a pipeline call share."""
        return self.num_inference_steps, self.guidance_scale


def load() -> Any:
    """The pipeline, on the CPU and in float32, as the engine runs it."""
    pipe = DiffusionPipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, bodies: Sequence[Body]) -> list[Image.Image]:
    """One pipeline call for one or more requests of equal settings."""
    [(steps, guidance)] = {body.settings for body in bodies}
    images: list[Image.Image] = pipe(
        [body.prompt for body in bodies],
        generator=[torch.Generator().manual_seed(body.seed) for body in bodies],
        num_inference_steps=steps,
        guidance_scale=guidance,
        **DEFAULTS,
    ).images
    return images


def answer(image: Image.Image) -> dict[str, Any]:
    """The answer to the client."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return {"data": [{"b64_json": base64.b64encode(out.getvalue()).decode()}]}
