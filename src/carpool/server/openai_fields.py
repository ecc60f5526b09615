"""Translate OpenAI's fields to parameters of the served model's pipeline, and check them."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from carpool.errors import InvalidValue, SizeRejected, UnknownParameter, UnsupportedParameter, show
from carpool.media.outputs import FPS, check_fps
from carpool.request.card import Card, Makes
from carpool.request.images import NAMES as PICTURES
from carpool.request.parameters import check
from carpool.request.sizes import area_of, check_size
from carpool.server.access.keys import KEYLESS, APIClient
from carpool.server.bodies import schema
from carpool.server.bodies.forms import number
from carpool.server.state import ServedModel
from carpool.types import CheckedRequest, Request

QUALITIES = {"auto": 1.0, "low": 0.5, "medium": 1.0, "high": 1.5, "xhigh": 2.0, "max": 3.0}
QUALITIES |= {"standard": 1.0, "hd": 1.5}  # OpenAI's older words
FEW_STEPS = 8  # a model with at most this default is distilled
EDITS = ("image", "images", "mask", "mask_image")
"""Picture fields of `POST /v1/images/edits`."""

_ENDPOINTS: dict[str, str] = {
    "pictures": "POST /v1/images/generations",
    "videos": "POST /v1/videos",
    "meshes": "POST /v1/meshes",
    "sound": "POST /v1/audio/generations",
    "text": "POST /v1/chat/completions",
    "layers": "carpool.load in Python, without workers,",
}
_RESERVED = {"self", "request_id", "tenant"}  # arguments of `Request` that no body may set
_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")


def video_request(
    model: ServedModel,
    body: schema.VideoRequest,
    max_frames: int,
    *,
    client: APIClient = KEYLESS,
    pictures: Mapping[str, Any] | None = None,
) -> tuple[CheckedRequest, dict[str, Any]]:
    """Check a body; returns its request and the public fields of its job.

    Args:
        pictures: the input pictures and implied sizes, as arguments of the pipeline.

    Raises:
        Rejected, ModelNotFound: the message has the problem and the nearest valid value.
    """
    card, fields = model.card, body.model_dump(exclude_unset=True, exclude_none=True)
    parameters = pipeline_parameters(model, body, fields, "videos", client)
    if "output_format" in parameters:
        rule = "is not supported: a video is an MP4 file, leave it out"
        raise UnsupportedParameter(f"output_format {rule}", param="output_format")
    parameters |= size_fields(card, body.size, parameters) | dict(pictures or {})
    parameters |= area_of(card, parameters)
    own_rate = {p.name: p.default for p in card.parameters}.get("frame_rate")
    own_rate = parameters.get("frame_rate") or own_rate or FPS
    fps = _rate("fps", body.fps) or _rate("frame_rate", own_rate) or FPS
    if card.tasks[0].takes("frame_rate"):
        parameters["frame_rate"] = fps
    seconds = number_of(body.seconds)
    if seconds is not None:
        if not 0 < seconds <= max_frames:
            raise InvalidValue.of("seconds", body.seconds, f"must be above 0, at most {max_frames}")
        if body.num_frames is not None:
            raise InvalidValue("give seconds or num_frames, not both", param="seconds")
        parameters["num_frames"] = round(seconds * fps) + 1  # models count k * n + 1
    checked = check(card, engine_request(body, client.key, parameters, body.seed), from_json=True)
    checked = replace(checked, model=model.id)
    defaults = {p.name: p.default for p in card.task(checked.task).parameters}
    arguments: dict[str, Any] = {**defaults, **checked.arguments}
    names = "width", "height", "num_frames"
    width, height, frames = (int(arguments.get(name) or 0) for name in names)
    length = length_of(card, arguments)
    if length > max_frames:
        makes_more = f" makes {length} frames" if length != frames else ""
        rule = f"must be at most {max_frames}"
        if seconds is not None:
            seconds_limit = math.floor(10 * (max_frames - 1) / fps) / 10
            problem = f"seconds={show(body.seconds)} is {length} frames at {fps:g} a second"
            limit = f"{rule} (--max-frames), which is {seconds_limit:g} seconds"
            raise InvalidValue(f"{problem}: {limit}", param="seconds")
        problem = f"num_frames={frames}{makes_more}: {rule} (--max-frames)"
        raise InvalidValue(problem, param="num_frames")
    if length != frames:
        checked = replace(checked, arguments={**checked.arguments, "num_frames": length})
    return checked, {
        "model": model.id, "seeds": [checked.seed],
        "body": body.model_dump(exclude_none=True) | {"seed": checked.seed},
        "size": f"{width}x{height}", "fps": fps, "num_frames": length,
    }  # fmt: skip


def length_of(card: Card, arguments: Mapping[str, Any]) -> int:
    """The number of frames of a video with these arguments; 0 for a model without `num_frames`.

    Autoencoders decode k * n + 1 frames: the number is rounded as in Wan's pipeline. Helios makes
    whole chunks of a video, however few frames are requested.
    """
    frames, step = int(arguments.get("num_frames") or 0), card.frame_step
    latents = arguments.get("num_latent_frames_per_chunk")
    if not frames or step == 1:
        return frames
    if isinstance(latents, int) and latents > 0:
        piece = (latents - 1) * step + 1
        return (-(-frames // piece) * piece - 1) // step * step + 1
    return frames // step * step + 1 if frames % step != 1 else frames


def pipeline_parameters(
    model: ServedModel,
    body: schema.GenerationRequest,
    fields: Mapping[str, Any],
    makes: Makes,
    client: APIClient,
) -> dict[str, Any]:
    """The pipeline's parameters in a body, with the client's default adapters."""
    model.check_name(body.model)
    product = "layers" if "Layered" in model.card.pipeline else model.card.tasks[0].makes
    if product != makes:
        problem = f"{model.id} makes {product}, and this endpoint answers with {makes}"
        raise UnsupportedParameter(f"{problem}: {_ENDPOINTS[product]} makes them", param="model")
    check_characters(fields)
    declared = type(body).model_fields
    parameters = {
        name: value
        for name, value in fields.items()
        if name not in declared or (name in schema.PIPELINE_FIELDS and value is not None)
    }
    for name in sorted(parameters.keys() & _RESERVED):
        raise UnknownParameter(f"{model.card.pipeline} has no parameter {name!r}", param=name)
    if parameters.get("lora") is None and model.default_lora.get(client.owner):
        parameters["lora"] = model.default_lora[client.owner]
    return parameters


def check_characters(fields: Mapping[str, Any]) -> None:
    """Refuse half of a character, which JSON can write: "\\ud800"."""
    for name, value in fields.items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            rule = "must be text without lone surrogates: send whole characters"
            raise InvalidValue(f"{name} has {half!a}: {rule}", param=name) from None


def engine_request(
    body: schema.GenerationRequest, key: str, parameters: Mapping[str, Any], seed: Any
) -> Request:
    """Make a request that counts toward its client's share of the device.

    The tenant is the API key; the users that bodies name divide its share. Without keys only the
    body distinguishes clients, so each user is a tenant.
    """
    user = body.safety_identifier or body.user or ""
    share = {"tenant": key, "user": user} if key else {"tenant": user}
    prompt = body.prompt if "prompt" in body.model_fields_set else None  # a mesh needs no prompt
    return Request(prompt, seed=seed, timeout_s=body.timeout_s, **share, **parameters)


def refuse_edits(card: Card, parameters: Mapping[str, Any]) -> None:
    """Refuse fields of edits in a body without pictures; the error names the right endpoint."""
    if not card.task_for(["image"]).takes("image"):
        return
    names = set(EDITS)
    names |= {n for n in (*PICTURES, "strength") if any(task.takes(n) for task in card.tasks)}
    names -= {"strength"} if card.tasks[0].takes("strength") else set()
    for name in parameters:
        if name in names and parameters[name] is not None:
            rule = "send it with its picture to POST /v1/images/edits"
            raise UnsupportedParameter(f"{name} is not supported here: {rule}", param=name)


def quality_steps(
    card: Card, quality: str | None, parameters: Mapping[str, Any], warnings: list[str]
) -> dict[str, int]:
    """Scale the model's default steps by a quality.

    Empty, with a warning, if the request sets steps itself, and for models distilled to a few
    steps: they were trained for just those steps.
    """
    names = {name for name, value in parameters.items() if value is not None}
    defaults = {p.name: p.default for p in card.task_for(names).parameters}
    steps = card.defaults.get("num_inference_steps", defaults.get("num_inference_steps"))
    is_own = bool(names & {"num_inference_steps", "sigmas", "timesteps"})
    factor = QUALITIES[quality or "auto"]
    if factor == 1:
        return {}
    if not is_own and isinstance(steps, int) and steps > FEW_STEPS:
        return {"num_inference_steps": min(card.max_steps, max(1, round(steps * factor)))}
    rule = f"models of up to {FEW_STEPS} steps keep theirs"
    rule = "the request sets its steps" if is_own else rule
    warnings.append(f"quality={quality} changes nothing: {rule}")
    return {}


def size_fields(card: Card, size: str | None, parameters: Mapping[str, Any]) -> dict[str, int]:
    if size is None or size == "auto":
        return {}
    if any(parameters.get(side) is not None for side in ("width", "height")):
        raise InvalidValue("give size, or width and height, not both", param="size")
    match = _SIZE.fullmatch(size)
    if match is None:
        width, height = card.usual_size_px or (8 * card.size_multiple_px,) * 2
        rule = f"write WIDTHxHEIGHT in pixels, such as {width}x{height}, or auto"
        raise SizeRejected(f"size {show(size)} is not supported: {rule}", param="size")
    sides = {"width": int(match[1]), "height": int(match[2])}
    if not any(task.takes("width") for task in card.tasks):
        rule = "sets the size itself, leave it out"
        raise UnsupportedParameter(f"size is not supported: {card.pipeline} {rule}", param="size")
    # the answer has exactly the requested size
    check_size(replace(card, rounds_sizes=False), sides | area_of(card, sides))
    return sides


def _rate(name: str, value: Any) -> float | None:
    """Parse frames a second; None if the body has none."""
    rate = number_of(value)
    return None if rate is None else check_fps(rate, name, show(value))


def number_of(value: Any) -> float | None:
    """Parse a number, also from text; NaN for anything else."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return number(value)
        is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_plain else math.nan
    except (ValueError, OverflowError):
        return math.nan
