"""Bodies of AUTOMATIC1111's API, and the fields of `ImageRequest` that they stand for.

Clients send all fields of that API always. Those that are at rest, or that change no picture, are
left out; those that would change it in a way that is not known here are refused by name.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from carpool.errors import InvalidValue, ModelNotFound, UnsupportedParameter, show
from carpool.media.metadata import as_text
from carpool.request.card import Card
from carpool.request.values import is_int
from carpool.server.bodies import schema

SAMPLER = "Automatic"  # the model's own
LORA = re.compile(r"<lora:([^:<>]{1,64}):(-?[0-9]{1,4}(?:\.[0-9]{1,6})?)>")
_TEXT_LIMIT = 32_000

_RESTING: dict[str, tuple[Any, ...]] = {  # values with which a field does nothing
    "enable_hr": (False,), "restore_faces": (False,), "tiling": (False,),
    "styles": ([],), "subseed_strength": (0,), "seed_resize_from_h": (-1, 0),
    "seed_resize_from_w": (-1, 0), "script_name": ("", "None"), "script_args": ([],),
    "refiner_checkpoint": ("",), "image_cfg_scale": (1.5,), "initial_noise_multiplier": (0, 1),
    "eta": (0, 1), "s_churn": (0,), "s_tmin": (0,), "s_tmax": (0,), "s_noise": (1,),
    "sampler_name": ("", SAMPLER), "sampler_index": ("", SAMPLER), "scheduler": ("", SAMPLER),
    "firstphase_width": (0,), "firstphase_height": (0,),
}  # fmt: skip
_UNREAD = """url auth subseed save_images send_images do_not_save_samples do_not_save_grid
override_settings_restore_afterwards include_init_images disable_extra_networks force_task_id
refiner_switch_at s_min_uncond comments"""
UNREAD = frozenset(_UNREAD.split())
"""Fields about files, answers and other fields: they change no picture."""


class Text2Image(BaseModel):
    """`POST /sdapi/v1/txt2img`. Fields that would change the picture in other ways are refused."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"prompt": "a cat"}]})

    prompt: str = Field("", max_length=_TEXT_LIMIT, description="may name adapters: <lora:NAME:1>")
    negative_prompt: str | None = Field(None, max_length=_TEXT_LIMIT)
    seed: Any = schema.ours("integer", "-1 or absent: drawn and reported")
    batch_size: Any = schema.ours("integer", "pictures, times n_iter")
    n_iter: Any = schema.ours("integer", "pictures, times batch_size")
    steps: Any = schema.ours("integer", "denoising steps; default: the model's own")
    cfg_scale: Any = schema.ours(
        "number", "classifier-free guidance: true_cfg_scale where the model has it"
    )
    distilled_cfg_scale: Any = schema.ours("number", "guidance_scale of distilled models")
    width: Any = schema.ours("integer", "pixels; default: the model's own")
    height: Any = schema.ours("integer", "pixels; default: the model's own")
    denoising_strength: Any = schema.ours("number", "of img2img: how much is drawn anew")
    sampler_name: str | None = Field(None, description="Automatic: the model's own")
    scheduler: str | None = Field(None, description="Automatic: the model's own")
    override_settings: dict[str, Any] | None = Field(
        None, description="sd_model_checkpoint, CLIP_stop_at_last_layers"
    )
    alwayson_scripts: dict[str, Any] | None = Field(None, description="none is known here")
    send_images: bool | None = Field(True, description="are they in the answer?")


class Image2Image(Text2Image):
    """`POST /sdapi/v1/img2img`: as `txt2img`, from pictures."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"examples": [{"prompt": "a cat", "init_images": ["iVBORw0KGgo..."]}]},
    )

    init_images: list[Any] = Field(
        min_length=1, description="pictures, in base64 or as data:image/png;base64,..."
    )
    mask: Any = schema.ours("string", "a picture, white where to draw anew")
    mask_blur: Any = schema.ours("integer", "pixels")
    inpainting_mask_invert: Any = schema.ours("integer", "1: draw anew where it is black")
    inpainting_fill: Any = schema.ours("integer", "1, the picture itself, is the only one")
    inpaint_full_res: Any = schema.ours(
        "boolean", "draw only around the mask, where the model has padding_mask_crop"
    )
    inpaint_full_res_padding: Any = schema.ours("integer", "pixels around it")
    resize_mode: Any = schema.ours("integer", "0, just resize, is the only one")


class Drawn(BaseModel):
    images: list[str] = Field(description="PNG files in base64")
    parameters: dict[str, Any] = Field(description="as they were sent, without pictures and nulls")
    info: str = Field(description="JSON: seeds, size, and what else was drawn with")


class ProgressState(BaseModel):
    skipped: bool = False
    interrupted: bool = False
    job: str = ""
    job_count: int = Field(description="requests of this API key that run")
    job_timestamp: str = "0"
    job_no: int = 0
    sampling_step: int
    sampling_steps: int


class ProgressResponse(BaseModel):
    progress: float = Field(description="0 to 1, of this API key's requests; 0: there are none")
    eta_relative: float = Field(default=0.0, description="seconds; 0 where it is not known")
    state: ProgressState
    current_image: None = None
    textinfo: str | None = None


class SDModel(BaseModel):
    title: str = Field(description="what requests name it by")
    model_name: str
    hash: None = None
    sha256: None = None
    filename: str = ""
    config: None = None


class Sampler(BaseModel):
    name: str
    aliases: list[str] = []
    options: dict[str, str] = {}


class SchedulerName(BaseModel):
    name: str
    label: str
    aliases: list[str] | None = None
    default_rho: float = -1
    need_inner_model: bool = False


class Lora(BaseModel):
    name: str
    alias: str
    path: str = ""
    metadata: dict[str, Any] = {}


class Options(BaseModel):
    """The settings of that program; only the served model is one here."""

    model_config = ConfigDict(extra="allow")

    sd_model_checkpoint: str | None = None
    sd_vae: str | None = "Automatic"
    CLIP_stop_at_last_layers: int | None = 1
    samples_format: str | None = "png"


def translated(
    body: Text2Image, card: Card, model: str, *, keeps_size: bool = False
) -> dict[str, Any]:
    """The fields of an `ImageRequest`.

    Args:
        model: the name that it is served under.
        keeps_size: is the size seen to elsewhere, as that of a picture to start from?

    Raises:
        Rejected: a field would change the picture in a way that is not known here.
    """
    known = {one.name for task in card.tasks for one in task.parameters}
    prompt, lora = _adapters(body.prompt)
    values: dict[str, Any] = {"prompt": prompt, "n": _pictures(body)}
    values |= {"lora": lora} if lora else {}
    values |= {"seed": body.seed} if body.seed not in (None, -1) else {}
    given = {
        "negative_prompt": body.negative_prompt or None,
        "num_inference_steps": body.steps,
        "width": None if keeps_size else body.width,
        "height": None if keeps_size else body.height,
        "strength": body.denoising_strength if isinstance(body, Image2Image) else None,
    }
    cfg = "true_cfg_scale" if "true_cfg_scale" in known else "guidance_scale"
    given[cfg] = body.cfg_scale
    given |= {"guidance_scale": body.distilled_cfg_scale} if body.distilled_cfg_scale else {}
    values |= {name: value for name, value in given.items() if value is not None}
    values |= _settings(body.override_settings or {}, card, model)
    _check_scripts(body.alwayson_scripts or {})
    others = {"sampler_name": body.sampler_name, "scheduler": body.scheduler}
    for name, value in {**others, **(body.model_extra or {})}.items():
        if value is None or name in UNREAD or name.startswith("hr_"):  # of enable_hr
            continue
        if value in _RESTING.get(name, ()) or _is_own(name, value):
            continue
        if name in known and name not in _RESTING:
            values[name] = value
            continue
        rule = "is not supported, and would change the picture: leave it out"
        if name in ("sampler_name", "sampler_index", "scheduler"):
            rule = f"is not known here: the model has a sampler of its own, {SAMPLER!r}"
        raise UnsupportedParameter(f"{name[:60]}={show(value)} {rule}", param=name[:60])
    return values


def _is_own(name: str, value: Any) -> bool:
    """Return whether a sampler is the model's own, in any case of letters."""
    is_sampler = name in ("sampler_name", "sampler_index", "scheduler")
    return is_sampler and isinstance(value, str) and value.lower() == SAMPLER.lower()


def _pictures(body: Text2Image) -> int:
    counts = {"batch_size": body.batch_size, "n_iter": body.n_iter}
    for name, count in counts.items():
        if count is not None and not (is_int(count) and 1 <= count <= 1000):
            raise InvalidValue.of(name, count, "must be a whole number above 0")
    return int(body.batch_size or 1) * int(body.n_iter or 1)


def _adapters(prompt: str) -> tuple[str, list[dict[str, Any]]]:
    """Split the adapters that a prompt names from its text."""
    lora = [{"id": name, "scale": float(scale)} for name, scale in LORA.findall(prompt)]
    return (re.sub(r"\s{2,}", " ", LORA.sub("", prompt)).strip() if lora else prompt), lora


def _settings(settings: Mapping[str, Any], card: Card, model: str) -> dict[str, Any]:
    """Fields of an `ImageRequest` for the settings of one request."""
    check_model(settings.get("sd_model_checkpoint"), card, model)
    known = {one.name for task in card.tasks for one in task.parameters}
    skip = settings.get("CLIP_stop_at_last_layers")
    for name, value in settings.items():
        if name in ("sd_model_checkpoint", "CLIP_stop_at_last_layers") or value is None:
            continue
        if name == "sd_vae" and value in ("", "Automatic", "None"):
            continue
        if name == "samples_format" and value == "png":
            continue
        rule = "is not supported: leave it out"
        raise UnsupportedParameter(f"override_settings.{name[:60]} {rule}", param=name[:60])
    if skip in (None, 1):
        return {}
    if not is_int(skip) or not 1 <= skip <= 12 or "clip_skip" not in known:
        rule = "must be 1" if "clip_skip" not in known else "must be from 1 to 12"
        name = "CLIP_stop_at_last_layers"
        raise InvalidValue.of(name, skip, f"{rule} for this model")
    return {"clip_skip": skip - 1}


def check_model(name: Any, card: Card, model: str) -> None:
    """Refuse the name of another model than the served one."""
    if name not in (None, "", model, card.id):
        seen = f"sd_model_checkpoint={show(name)}"
        raise ModelNotFound(f"{seen} is not served here, {model!r} is")


def _check_scripts(scripts: Mapping[str, Any]) -> None:
    """Refuse scripts that are switched on: those with any argument but False."""
    for name, script in scripts.items():
        arguments = script.get("args") if isinstance(script, dict) else script
        if arguments not in (None, [], [False], {}):
            rule = "is not known here: leave it out"
            raise UnsupportedParameter(
                f"alwayson_scripts.{name[:60]} {rule}", param="alwayson_scripts"
            )


def check_fill(body: Image2Image, card: Card) -> dict[str, Any]:
    """Check how a masked picture is to be filled; returns the pipeline's arguments.

    Raises:
        UnsupportedParameter: in a way that pipelines do not know.
    """
    if body.resize_mode not in (None, 0):
        rule = "is not supported: 0, just resize, is"
        raise UnsupportedParameter(f"resize_mode={show(body.resize_mode)} {rule}",
                                   param="resize_mode")  # fmt: skip
    if body.mask is None:
        return {}
    if body.inpainting_fill not in (None, 1):
        seen = f"inpainting_fill={show(body.inpainting_fill)}"
        rule = "is not supported: 1, the picture itself, is"
        raise UnsupportedParameter(f"{seen} {rule}", param="inpainting_fill")
    if not body.inpaint_full_res:
        return {}
    if not card.task_for(["image", "mask_image"]).takes("padding_mask_crop"):
        rule = "this model draws the whole picture: send false"
        raise UnsupportedParameter(f"inpaint_full_res: {rule}", param="inpaint_full_res")
    padding = body.inpaint_full_res_padding
    return {"padding_mask_crop": 32 if padding is None else padding}


def info(body: Text2Image, values: Mapping[str, Any], drawn: schema.ImagesResponse) -> str:
    """The `info` of an answer: the settings of its pictures, as JSON."""
    width, _, height = drawn.size.partition("x")
    seeds = [one.seed for one in drawn.data]
    prompt, negative = body.prompt, body.negative_prompt or ""
    told: dict[str, Any] = {
        "prompt": prompt,
        "all_prompts": [prompt] * len(seeds),
        "negative_prompt": negative,
        "all_negative_prompts": [negative] * len(seeds),
        "seed": seeds[0] if seeds else -1,
        "all_seeds": seeds,
        "width": int(width),
        "height": int(height),
        "sampler_name": SAMPLER,
        "cfg_scale": body.cfg_scale,
        "steps": values.get("num_inference_steps"),
        "batch_size": len(seeds),
        "denoising_strength": values.get("strength"),
        "sd_model_name": drawn.model,
        "infotexts": [_infotext(prompt, negative, values, drawn, seed) for seed in seeds],
        "warnings": drawn.warnings or [],
    }
    return json.dumps(told)


def _infotext(
    prompt: str, negative: str, values: Mapping[str, Any], drawn: schema.ImagesResponse, seed: int
) -> str:
    """The settings of a picture as that program writes them."""
    width, _, height = drawn.size.partition("x")
    told = {"prompt": prompt, "negative_prompt": negative, "seed": seed, "model": drawn.model}
    told |= {"num_inference_steps": values.get("num_inference_steps")}
    told |= {"guidance_scale": values.get("true_cfg_scale", values.get("guidance_scale"))}
    return as_text({**told, "width": width, "height": height})
