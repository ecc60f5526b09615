"""Plain diffusers, as the other servers call it: nothing of the engine.

Both servers answer `POST /v1/images/generations` as Carpool does, so that all parties do the same
work: the pipeline, a PNG, base64.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image

OF_ONE = ("prompt", "seed")  # what pictures of one pipeline call need not have in common
Body = Mapping[str, Any]


def settings(body: Body) -> tuple[tuple[str, Any], ...]:
    """The settings that all pictures of one pipeline call have in common."""
    shared = {name: value for name, value in body.items() if name not in OF_ONE}
    return tuple(sorted(shared.items()))


def load(folder: str) -> Any:
    """The pipeline, on the CPU and in float32, as the engine runs it."""
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, bodies: Sequence[Body]) -> list[Image.Image]:
    """One pipeline call for one or more requests of equal settings."""
    [shared] = {settings(body) for body in bodies}
    arguments = dict(shared)
    width, height = map(int, arguments.pop("size", "64x64").split("x"))  # the embedded model's
    arguments.pop("response_format", None)
    if (negative := arguments.get("negative_prompt")) is not None:
        arguments["negative_prompt"] = [negative] * len(bodies)
    images: list[Image.Image] = pipe(
        [body["prompt"] for body in bodies],
        generator=[torch.Generator().manual_seed(body["seed"]) for body in bodies],
        width=width,
        height=height,
        **arguments,
    ).images
    return images


def answer(image: Image.Image) -> dict[str, Any]:
    """The answer to the client."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return {"data": [{"b64_json": base64.b64encode(out.getvalue()).decode()}]}
