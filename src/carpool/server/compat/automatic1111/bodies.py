"""Bodies of AUTOMATIC1111's API; `fields.py` translates their fields."""

import contextlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from carpool.media.metadata import as_text
from carpool.server.bodies import schema

SAMPLER = "Automatic"  # the model's own sampler
_TEXT_LIMIT = 32_000


def _plain_number(value: Any) -> Any:
    """Accept numbers as that program does: as text, and integers written 1.0."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value) if "." in value or "e" in value.lower() else int(value)
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and abs(value) <= 2**53 else value


_Number = Annotated[Any, BeforeValidator(_plain_number)]
_Count = Annotated[Annotated[int, Field(ge=1, le=1000)] | None, BeforeValidator(_plain_number)]
_Blur = Annotated[Annotated[int, Field(ge=0, le=64)] | None, BeforeValidator(_plain_number)]


class Text2Image(BaseModel):
    """`POST /sdapi/v1/txt2img`. Unsupported fields that would change the picture are refused."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"prompt": "a cat"}]})

    prompt: str = Field("", max_length=_TEXT_LIMIT, description="may name adapters: <lora:NAME:1>")
    negative_prompt: str | None = Field(None, max_length=_TEXT_LIMIT)
    seed: _Number = schema.ours("integer", "-1 or absent: random; the answer reports it")
    batch_size: _Count = Field(None, description="pictures = batch_size * n_iter")
    n_iter: _Count = Field(None, description="pictures = batch_size * n_iter")
    steps: _Number = schema.ours("integer", "denoising steps; default: the model's own")
    cfg_scale: _Number = schema.ours(
        "number", "classifier-free guidance; sets true_cfg_scale if the model has it"
    )
    distilled_cfg_scale: _Number = schema.ours("number", "guidance_scale of distilled models")
    width: _Number = schema.ours("integer", "pixels; default: the model's own")
    height: _Number = schema.ours("integer", "pixels; default: the model's own")
    denoising_strength: _Number = schema.ours("number", "for img2img: share that is redrawn")
    sampler_name: str | None = Field(None, description="a name of /sdapi/v1/samplers, or Automatic")
    scheduler: str | None = Field(None, description="noise schedule, or Automatic")
    override_settings: dict[str, Any] | None = Field(
        None, description="sd_model_checkpoint, CLIP_stop_at_last_layers"
    )
    alwayson_scripts: dict[str, Any] | None = Field(None, description="none is supported")
    send_images: bool | None = Field(True, description="include them in the answer")


class Image2Image(Text2Image):
    """`POST /sdapi/v1/img2img`: `txt2img` that starts from pictures."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"examples": [{"prompt": "a cat", "init_images": ["iVBORw0KGgo..."]}]},
    )

    init_images: list[Any] = Field(
        min_length=1,
        description="base64 or data:image/png;base64,...; transparent parts become white",
    )
    mask: Any = schema.ours(
        "string", "white: redraw; if parts are transparent, the alpha channel is the mask"
    )
    mask_blur: _Blur = Field(None, description="pixels, in both directions")
    mask_blur_x: _Blur = Field(None, description="pixels, if mask_blur is absent")
    mask_blur_y: _Blur = Field(None, description="pixels, if mask_blur is absent")
    mask_round: Any = schema.ours("boolean", "round its alpha to black and white", True)
    inpainting_mask_invert: _Number = schema.ours("integer", "1: redraw the black parts")
    inpainting_fill: _Number = schema.ours(
        "integer", "1: start from the picture; 0: from the colours around the mask"
    )
    inpaint_full_res: Any = schema.ours(
        "boolean", "draw only around the mask, if the model has padding_mask_crop"
    )
    inpaint_full_res_padding: _Number = schema.ours("integer", "pixels around the mask")
    resize_mode: _Number = schema.ours("integer", "only 0 (just resize)")


class Drawn(BaseModel):
    images: list[str] = Field(description="PNG files in base64")
    parameters: dict[str, Any] = Field(description="the sent parameters without pictures and nulls")
    info: str = Field(description="JSON: seeds, size and all other settings")


class ProgressState(BaseModel):
    skipped: bool = False
    interrupted: bool = False
    job: str = ""
    job_count: int = Field(description="running requests of this API key")
    job_timestamp: str = "0"
    job_no: int = 0
    sampling_step: int
    sampling_steps: int


class ProgressResponse(BaseModel):
    progress: float = Field(description="0 to 1, of this API key's requests; 0: none")
    eta_relative: float = Field(default=0.0, description="seconds; 0 if unknown")
    state: ProgressState
    current_image: None = None
    textinfo: str | None = None


class Options(BaseModel):
    """AUTOMATIC1111's settings; only the model is one here."""

    model_config = ConfigDict(extra="allow")

    sd_model_checkpoint: str | None = None
    sd_vae: str | None = "Automatic"
    CLIP_stop_at_last_layers: int | None = 1
    samples_format: str | None = "png"


def info(body: Text2Image, values: Mapping[str, Any], answer: schema.ImagesResponse) -> str:
    """The `info` of an answer: the settings of its pictures, as JSON."""
    width, _, height = answer.size.partition("x")
    seeds = [image.seed for image in answer.data]
    images = [{"seed": image.seed, "revised_prompt": image.revised_prompt} for image in answer.data]
    settings = {**values, **(answer.settings or {})}
    prompt, negative = body.prompt, body.negative_prompt or ""
    texts = {"prompt": prompt, "negative_prompt": negative, "model": answer.model}
    drawn = {**settings, **texts, "width": width, "height": height}
    fields: dict[str, Any] = {
        "prompt": prompt,
        "all_prompts": [prompt] * len(seeds),
        "negative_prompt": negative,
        "all_negative_prompts": [negative] * len(seeds),
        "seed": seeds[0] if seeds else -1,
        "all_seeds": seeds,
        "width": int(width),
        "height": int(height),
        "sampler_name": SAMPLER,
        "cfg_scale": settings.get("true_cfg_scale", settings.get("guidance_scale")),
        "steps": settings.get("num_inference_steps"),
        "batch_size": len(seeds),
        "denoising_strength": settings.get("strength"),
        "sd_model_name": answer.model,
        "infotexts": [as_text(drawn | image) for image in images],
        "warnings": answer.warnings or [],
    }
    return json.dumps(fields)
