"""Translate fields of AUTOMATIC1111's API to fields of an `ImageRequest`.

Clients of that API always send all fields. Fields with their neutral value are dropped, and so are
fields that never change a picture. An unsupported field that would change the picture is refused by
name.
"""

from collections.abc import Mapping
from typing import Any

from carpool.errors import InvalidValue, ModelNotFound, UnsupportedParameter, show
from carpool.request.card import Card
from carpool.request.prompt_weights import has_weights, weights_warning, without_escapes
from carpool.request.values import is_int, is_number
from carpool.server.bodies.forms import Form
from carpool.server.compat.automatic1111 import prompt_tags
from carpool.server.compat.automatic1111.bodies import SAMPLER, Image2Image, Text2Image

_RESTING: dict[str, tuple[Any, ...]] = {  # neutral values of fields
    "enable_hr": (False,), "restore_faces": (False,), "tiling": (False,), "styles": ([], [""]),
    "subseed_strength": (0,), "seed_resize_from_h": (-1, 0), "seed_resize_from_w": (-1, 0),
    "script_name": ("", "None"), "refiner_checkpoint": ("", "None"), "infotext": ("",),
    "initial_noise_multiplier": (1,), "token_merging_ratio": (0,), "extra_generation_params": ({},),
    "s_churn": (0,), "s_tmin": (0,), "s_tmax": (0,), "s_noise": (1,), "s_min_uncond": (0,),
    "ddim_discretize": ("uniform",), "sampler_name": ("",), "sampler_index": ("", "Euler"),
    "scheduler": ("",),
}  # fmt: skip
_UNREAD = """url auth subseed save_images send_images do_not_save_samples do_not_save_grid user
override_settings_restore_afterwards include_init_images disable_extra_networks force_task_id
refiner_switch_at comments firstphase_width firstphase_height script_args
seed_enable_extras token_merging_ratio_hr do_not_reload_embeddings image_cfg_scale eta clip_skip"""
UNREAD = frozenset(_UNREAD.split())
"""Fields that alone change no picture (files, answers, other fields), and fields that are read
elsewhere (SD.Next's `clip_skip` counts layers as `CLIP_stop_at_last_layers` does)."""
_SAMPLERS = ("sampler_name", "sampler_index", "scheduler")
_RESTING_SETTINGS: dict[str, tuple[Any, ...]] = {
    "sd_vae": ("", "Automatic", "None"), "samples_format": ("png",), "eta_noise_seed_delta": (0,),
    "forge_additional_modules": ([],), "sdxl_clip_l_skip": (False,),
    "initial_noise_multiplier": (1,), "img2img_background_color": ("#ffffff",),
    "img2img_color_correction": (False,),
}  # fmt: skip
_CLIP_SKIP = "CLIP_stop_at_last_layers"
_FORGE_GUIDANCE = 3.5  # default of Forge's clients, sent for any model
_MOST_LAYERS = 12


def translated(body: Text2Image, card: Card, model: str, *, keeps_size: bool = False) -> Form:
    """Translate a body to the fields of an `ImageRequest`, without its pictures.

    Args:
        model: the served name of the model.
        keeps_size: the caller handles the size, for example by resizing the input picture.

    Raises:
        Rejected: an unsupported field would change the picture.
    """
    names = {parameter.name for task in card.tasks for parameter in task.parameters}
    extra = body.model_extra or {}
    prompt, tags = prompt_tags.split_tags(body.prompt)
    prompt_tags.refuse_tags(body.negative_prompt or "", "negative_prompt")
    negative = body.negative_prompt or ""
    is_weighted = card.weights_reader == "compel" and (has_weights(prompt) or has_weights(negative))
    n = (body.batch_size or 1) * (body.n_iter or 1)
    form = Form({"n": n, "prompt_weights": is_weighted}, name="init_images", is_before_white=True)
    for name, text in (("prompt", prompt), ("negative_prompt", negative)):
        form.warnings += weights_warning(text, name, card, is_notation=True, is_read=is_weighted)
        if text or name == "prompt":
            form.values[name] = text if is_weighted else without_escapes(text)
    if tags and not extra.get("disable_extra_networks"):
        form.values["lora"] = prompt_tags.adapters_of(tags, card.adapters)
    fields = {
        "seed": None if body.seed in (-1, "") else body.seed,
        "num_inference_steps": body.steps,
        "width": None if keeps_size else body.width,
        "height": None if keeps_size else body.height,
        "strength": body.denoising_strength if isinstance(body, Image2Image) else None,
    }
    if "image_guidance_scale" in names:
        fields["image_guidance_scale"] = extra.get("image_cfg_scale")
    form.values |= {name: value for name, value in fields.items() if value is not None}
    _add_guidance(form, body, names)
    _add_eta(form, extra.get("eta"), names)
    settings = {name: v for name, v in (body.override_settings or {}).items() if v is not None}
    _add_settings(form, {_CLIP_SKIP: extra.get("clip_skip")} | settings, card, model)
    _check_scripts(body.alwayson_scripts or {})
    rest = {"sampler_name": body.sampler_name, "scheduler": body.scheduler, **extra}
    _add_sampler(form, rest, card)
    for name, value in rest.items():
        is_translated = name in _SAMPLERS and "scheduler" in form.values
        if is_translated or value is None or name in UNREAD or name.startswith("hr_"):
            continue  # `hr_...` fields belong to enable_hr
        if value in _RESTING.get(name, ()) or _is_own(name, value):
            continue
        if name == "sampler_index" and body.sampler_name:  # `sampler_name` wins
            continue
        if name in names and name not in _RESTING:
            form.values[name] = value
            continue
        rule = "is not supported, and would change the picture: leave it out"
        if name in _SAMPLERS:
            rule = f"is not supported by this model: send {SAMPLER!r}, its own sampler"
        raise UnsupportedParameter(f"{name[:60]}={show(value)} {rule}", param=name[:60])
    return form


def _add_sampler(form: Form, fields: Mapping[str, Any], card: Card) -> None:
    """Add a sampler with its noise schedule, if the model's own can be replaced."""
    names = {
        name: value
        for name in _SAMPLERS
        if isinstance(value := fields.get(name), str)
        and not (value in _RESTING[name] or _is_own(name, value))
    }
    sampler = names.get("sampler_name") or names.get("sampler_index")
    if card.schedulers and sampler:
        schedule = names.get("scheduler", "")
        form.values["scheduler"] = f"{sampler} {schedule}".strip()


def _is_own(name: str, value: Any) -> bool:
    """Return whether a sampler is the model's own; ignores case."""
    return name in _SAMPLERS and isinstance(value, str) and value.lower() == SAMPLER.lower()


def _add_guidance(form: Form, body: Text2Image, names: set[str]) -> None:
    """Add `cfg_scale`, and Forge's `distilled_cfg_scale` for distilled models."""
    distilled = body.distilled_cfg_scale or None
    is_distilled = "true_cfg_scale" in names or "negative_prompt" not in names
    cfg = "true_cfg_scale" if "true_cfg_scale" in names else "guidance_scale"
    if body.cfg_scale is not None:
        form.values[cfg] = body.cfg_scale
    if distilled is None:
        return
    if is_distilled:
        form.values["guidance_scale"] = distilled
    elif distilled != _FORGE_GUIDANCE:
        text = f"distilled_cfg_scale={show(distilled)}"
        form.warnings.append(f"{text} changes nothing: this model's guidance is cfg_scale")


def _add_eta(form: Form, eta: Any, names: set[str]) -> None:
    if eta is None or (is_number(eta) and eta == 0):
        return
    if "eta" in names:
        form.values["eta"] = eta
    elif is_number(eta):
        reason = "changes nothing: this model's sampler takes none"
        form.warnings.append(f"eta={show(eta)} {reason}")
    else:
        raise InvalidValue.of("eta", eta, "must be a number")


def _add_settings(form: Form, settings: Mapping[str, Any], card: Card, model: str) -> None:
    """Add the settings of one request."""
    check_model(settings.get("sd_model_checkpoint"), card, model)
    for name, value in settings.items():
        is_read = name in ("sd_model_checkpoint", _CLIP_SKIP)
        if is_read or value is None or value in _RESTING_SETTINGS.get(name, ()):
            continue
        rule = "is not supported: leave it out"
        raise UnsupportedParameter(f"override_settings.{name[:60]} {rule}", param=name[:60])
    layers = settings.get(_CLIP_SKIP)
    if (skipped := skipped_layers(layers, card)) is not None:
        form.values["clip_skip"] = skipped
    elif layers not in (None, 1, 2):
        rule = "this model always takes the last layer but one of its text encoders"
        form.warnings.append(f"{_CLIP_SKIP}={show(layers)} changes nothing: {rule}")


def skipped_layers(layers: Any, card: Card) -> int | None:
    """Convert that program's setting to the pipeline's `clip_skip`; None if it changes nothing.

    Only Stable Diffusion 1's text encoder uses it. Pipelines with two encoders (SDXL, SD 3) count
    from the last layer but one, which that program always takes.

    Raises:
        InvalidValue: the model does not support the value.
    """
    if layers is None or (is_int(layers) and layers == 1):
        return None
    names = {parameter.name for task in card.tasks for parameter in task.parameters}
    if "clip_skip" not in names:
        raise InvalidValue.of(_CLIP_SKIP, layers, "must be 1 for this model")
    if not is_int(layers) or not 1 <= layers <= _MOST_LAYERS:
        raise InvalidValue.of(_CLIP_SKIP, layers, f"must be from 1 to {_MOST_LAYERS}")
    return None if "prompt_2" in names or card.has_fixed_text_layer else int(layers) - 1


def check_model(name: Any, card: Card, model: str) -> None:
    """Refuse the name of a model that is not the served model."""
    if name not in (None, "", model, card.id):
        text = f"sd_model_checkpoint={show(name)}"
        raise ModelNotFound(f"{text} is not served here: use {model!r}")


def _check_scripts(scripts: Mapping[str, Any]) -> None:
    """Refuse enabled scripts."""
    for name, script in scripts.items():
        is_known = isinstance(script, dict) and script.keys() <= {"args"}
        arguments = script.get("args") if is_known else script
        if not all(map(_is_off, arguments if isinstance(arguments, list) else [arguments])):
            rule = "is not supported: leave it out"
            raise UnsupportedParameter(
                f"alwayson_scripts.{name[:60]} {rule}", param="alwayson_scripts"
            )


def _is_off(argument: Any) -> bool:
    """Return whether an argument of a script is empty, or a disabled unit."""
    is_unit = isinstance(argument, dict) and argument.get("enabled") is False
    return is_unit or argument is None or argument is False or argument == {}


def check_fill(body: Image2Image, card: Card) -> dict[str, Any]:
    """Check the fill mode of a masked picture; returns the pipeline's arguments.

    Raises:
        UnsupportedParameter: pipelines do not support the mode.
    """
    if body.resize_mode not in (None, 0):
        rule = "is not supported: 0, just resize, is"
        raise UnsupportedParameter(f"resize_mode={show(body.resize_mode)} {rule}",
                                   param="resize_mode")  # fmt: skip
    if body.mask is None:
        return {}
    if body.inpainting_fill not in (None, 0, 1):
        text = f"inpainting_fill={show(body.inpainting_fill)}"
        rule = "is not supported: 1, the picture itself, and 0, the colours around it, are"
        raise UnsupportedParameter(f"{text} {rule}", param="inpainting_fill")
    if not body.inpaint_full_res:
        return {}
    if not card.task_for(["image", "mask_image"]).takes("padding_mask_crop"):
        rule = "this model draws the whole picture: send false"
        raise UnsupportedParameter(f"inpaint_full_res: {rule}", param="inpaint_full_res")
    padding = body.inpaint_full_res_padding
    return {"padding_mask_crop": 32 if padding is None else padding}
