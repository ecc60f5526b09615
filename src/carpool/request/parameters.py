"""Check a request against the parameters of a model, before it enters a queue.

Both the front process and the Python API use it. No torch.
"""

from collections.abc import Sequence
from typing import Any

from carpool.errors import (
    InvalidValue,
    MissingParameter,
    UnknownParameter,
    UnsupportedParameter,
    nearest,
)
from carpool.request.card import INSTEAD, INTERNAL, OWN_KEYS, PER_PROMPT, Card, Parameter, Task
from carpool.request.enhancement import check_enhancement
from carpool.request.images import NAMES as PICTURE_NAMES
from carpool.request.images import check_pictures
from carpool.request.lora import check_lora, refuse_scale
from carpool.request.own_values import check_priority, check_seed, check_step_cache, check_timeout
from carpool.request.prompt_weights import check_weights
from carpool.request.rules import check_rules, check_strength, check_texts
from carpool.request.samplers import check_scheduler
from carpool.request.texts import check_text
from carpool.request.values import KINDS, as_plain, is_int
from carpool.types import CheckedRequest, Request

SAME_MEANING = """
num_inference_steps steps step num_steps sampling_steps n_steps inference_steps
guidance_scale true_cfg_scale cfg cfg_scale guidance guidance_strength scale
true_cfg_scale guidance_scale cfg cfg_scale guidance guidance_strength scale true_cfg real_cfg
negative_prompt neg_prompt negative uncond_prompt
strength denoise denoising_strength image_strength
num_frames frames video_length length
frame_rate fps
audio_end_in_s audio_length_in_s audio_duration audio_duration_s seconds duration
image images input_images init_image input_image
mask_image mask
scheduler sampler sampler_name sampler_index scheduler_name sampling_method
frame_size size resolution
"""
"""Names of parameters in pipelines and other programs; a line has the names of one meaning."""
STANDARD = """prompt prompt_2 width height clip_skip max_sequence_length control_image last_image
ip_adapter_image"""
ELSEWHERE = {  # names of other programs: the parameter that a hint needs, and the hint
    "size resolution": ("width", "say width and height, in pixels"),
    "seconds duration": ("num_frames", "say num_frames, which is seconds x frames a second"),
    "batch_size num_images num_outputs": (None, "say n, the number of outputs for each prompt"),
    "dtype torch_dtype device": (None, "it is a setting of the server or engine"),
}
_MAX_LISTED = 8  # parameters in a message
_OPTIONAL_PICTURES = ("ip_adapter_image", "last_image", "image_reference")


def check(card: Card, request: Request, *, from_json: bool = False) -> CheckedRequest:
    """Check a request; returns it with its arguments, task and seed.

    Args:
        card: card of the model.
        request: the caller's request.
        from_json: it came over HTTP, so it cannot have tensors or callables.

    Raises:
        Rejected: the message has the value, the rule, and the nearest valid value.
    """
    values = dict(request.parameters)
    if request.prompt is not None:
        values["prompt"] = request.prompt
    lora = check_lora(values.pop("lora", None), card.lora, card.adapters)
    deadline_s, priority = values.pop("deadline_s", None), values.pop("priority", None)
    step_cache, scheduler = values.pop("step_cache", None), values.pop("scheduler", None)
    task = card.task_for(name for name, value in values.items() if value is not None)
    declared = {parameter.name: parameter for parameter in task.parameters}
    weights = None if "prompt_weights" in declared else values.pop("prompt_weights", None)
    wish = None if "enhance_prompt" in declared else values.pop("enhance_prompt", None)
    arguments = {name: value for name, value in card.defaults.items() if name in declared}
    for name, value in values.items():
        is_one = name in PER_PROMPT and is_int(value) and value == 1
        if name in INTERNAL and (value is None or name == "return_dict" or is_one):
            continue
        if name in INSTEAD:
            raise UnsupportedParameter(f"{name} is not taken: {INSTEAD[name]}", param=name)
        if value is None and (name not in declared or _is_absent(declared[name])):
            if not any(other_task.takes(name) for other_task in card.tasks):
                raise _unknown(card, task, name, from_json)
            continue
        if name not in declared:
            raise _unknown(card, task, name, from_json)
        if card.lora or from_json:
            refuse_scale(name, value)
        arguments[name] = None if value is None else _value(task, declared[name], value, from_json)
    enhance_prompt = check_enhancement(card, task, wish, arguments, values)
    prompt_weights = check_weights(card, task, weights, arguments)
    check_texts({name: value for name, value in arguments.items() if name in values})
    if "negative_prompt" in declared and arguments.get("negative_prompt_embeds") is not None:
        arguments.setdefault("negative_prompt", None)  # SANA's "" is refused with embeddings
    check_rules(card, task, arguments)
    if task.makes == "text":
        check_text(task, arguments)
    check_strength(task, arguments)
    check_pictures(
        arguments, mode=task.image_mode, max_images=task.max_images,
        least_px=card.size_multiple_px, max_pixels=card.max_pixels, takes_image="image" in declared,
    )  # fmt: skip
    present = {*arguments, *(name.removesuffix("_embeds") for name in arguments)}
    missing = [p.name for p in task.parameters if p.required and p.name not in present]
    has_prompt = any(arguments.get(name) is not None for name in ("prompt", "prompt_embeds"))
    if "prompt" in declared and task.needs_prompt and not has_prompt:
        missing.append("prompt")
    if missing:
        raise MissingParameter(
            f"{missing[0]} is missing: every request needs one", param=missing[0]
        )
    return CheckedRequest(
        request_id=request.request_id, seed=check_seed(request.seed), arguments=arguments,
        timeout_s=None if request.timeout_s is None else check_timeout(request.timeout_s),
        task=task.name, lora=lora,
        deadline_s=None if deadline_s is None else check_timeout(deadline_s, "deadline_s"),
        priority=0 if priority is None else check_priority(priority),
        tenant=request.tenant, user=request.user, output_type=task.file_type if from_json else None,
        step_cache=None if step_cache is None else check_step_cache(step_cache),
        scheduler=check_scheduler(scheduler, card.schedulers, card.scheduler),
        enhance_prompt=enhance_prompt, prompt_weights=prompt_weights,
    )  # fmt: skip


def _is_absent(parameter: Parameter) -> bool:
    """Return whether None means that a parameter is missing: true if None is its default.

    Then server defaults and limits apply. Otherwise None is an explicit value. Null members of HTTP
    bodies were dropped before: see `server.bodies.json_bodies`.
    """
    is_default = parameter.default is None and parameter.default_is_none
    return is_default or parameter.name == "output_type"


def _unknown(card: Card, task: Task, name: str, from_json: bool) -> UnknownParameter:
    return UnknownParameter(
        f"{task.pipeline} has no parameter {name!r}{_hint(card, task, name, from_json)}", param=name
    )


def _hint(card: Card, task: Task, name: str, from_json: bool) -> str:
    """The nearest thing that works in the place of an unknown parameter."""
    text = name.lower()
    other_task = next((candidate for candidate in card.tasks if candidate.takes(name)), None)
    if other_task:  # for example `strength` without a picture
        pictures = [n for n in PICTURE_NAMES if other_task.takes(n) and n not in _OPTIONAL_PICTURES]
        return f": {other_task.name} takes it, with {' and '.join(pictures) or 'other inputs'}"
    for names, (own, hint) in ELSEWHERE.items():
        if text in names.split() and (own is None or any(task.takes(own) for task in card.tasks)):
            return f": {hint}"
    offered = [n for n in card.names() if not (from_json and n == "output_type")]
    lines = [line.split() for line in SAME_MEANING.splitlines() if text in line.split()]
    lines += [[text]] * (text in STANDARD.split())
    synonyms = [n for line in lines for n in line if task.takes(n) or n in OWN_KEYS]
    if lines and not synonyms and text not in offered:
        taken = [
            p.name for p in task.parameters
            if p.name in PICTURE_NAMES or (p.kind != "other" and p.name in offered)
        ]  # fmt: skip
        is_first = text in [line[0] for line in lines]
        synonyms = [n for n in taken if is_first and n.endswith(f"_{text}")]  # such as `prior_...`
        if not synonyms:
            rest = ", ..." * (len(taken) > _MAX_LISTED)
            return f": it takes {', '.join(taken[:_MAX_LISTED])}{rest}" if taken else ""
    close = next((n for n in [*synonyms, text] if n in offered), None)
    return f"; did you mean {close!r}?" if close else nearest(name, offered)


def _value(task: Task, parameter: Parameter, value: Any, from_json: bool) -> Any:
    name, kind, kinds = parameter.name, parameter.kind, (parameter.kind, *parameter.also)
    value = as_plain(value, also_arrays="other" not in kinds)
    if name == "prompt" and isinstance(value, Sequence) and not isinstance(value, str):
        raise InvalidValue(
            f"prompt is a list of {len(value)}: send one request for each prompt (in Python, "
            "generate([...]) does)",
            param="prompt",
        )
    rule = KINDS[kind][1] or " or ".join(KINDS[other_kind][1] for other_kind in parameter.also)
    fits = any(KINDS[kind][0](value) for kind in kinds) or ("other" in kinds and not from_json)
    if name == "output_type":
        fits, rule = value in task.output_types, f"one of {', '.join(task.output_types)}"
        if from_json:
            of_videos = "is not supported: a video is an MP4 file, leave it out"
            problem = of_videos if task.makes == "videos" else "is not taken: use output_format"
            raise UnsupportedParameter(f"output_type {problem}", param=name)
    if fits:
        return float(value) if kind == "float" and is_int(value) else value
    if not rule:
        raise UnsupportedParameter(f"{name} cannot be sent as JSON", param=name)
    raise InvalidValue.of(name, value, f"must be {rule}")
