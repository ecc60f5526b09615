"""Parameters of requests: a model's own as data, and the checks of a request against them.

The parameters are those of the pipeline's `__call__`, read once when it is loaded. Everything a
request says is checked here, before it waits in any queue, in the front process as in the Python
API. No torch.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from carpool.errors import (
    InvalidValue,
    MissingParameter,
    SizeRejected,
    UnknownParameter,
    UnsupportedParameter,
    nearest,
)
from carpool.request.images import NAMES as PICTURE_NAMES
from carpool.request.images import check_pictures
from carpool.request.lora import check_lora, refuse_scale
from carpool.request.own_values import check_priority, check_seed, check_step_cache, check_timeout
from carpool.request.values import KINDS, ParameterKind, as_plain, is_int, is_number
from carpool.types import CheckedRequest, Request

OURS = ("n", "seed", "timeout_s", "lora", "deadline_s", "priority", "step_cache")
MOST_TEXT = 32_000  # characters of one parameter, as OpenAI has it
MOST_TEXTS = 2 * MOST_TEXT  # of a request
PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
INSTEAD = {
    "generator": "pass seed, every request gets a generator of its own",
    **dict.fromkeys(PER_PROMPT, "pass n"),
    "n": "one request has one output; generate(..., n=...) makes several",
}
OTHER_NAMES: dict[str, tuple[str, ...]] = {  # in other programs: what they are called here
    **dict.fromkeys(
        ("steps", "step", "num_steps", "sampling_steps", "n_steps", "inference_steps"),
        ("num_inference_steps",),
    ),
    **dict.fromkeys(
        ("cfg", "cfg_scale", "guidance", "guidance_strength", "scale"),
        ("guidance_scale", "true_cfg_scale"),
    ),
    **dict.fromkeys(("true_cfg", "real_cfg"), ("true_cfg_scale",)),
    **dict.fromkeys(("negative", "neg_prompt", "uncond_prompt"), ("negative_prompt",)),
    **dict.fromkeys(("denoise", "denoising_strength", "image_strength"), ("strength",)),
    **dict.fromkeys(("frames", "length", "video_length"), ("num_frames",)),
    **dict.fromkeys(("fps",), ("frame_rate",)),
    **dict.fromkeys(("mask",), ("mask_image",)),
    **dict.fromkeys(("init_image", "input_image"), ("image",)),
}
_SCHEDULER = (
    "every request runs a copy of the model's own scheduler; choose another in the model's folder "
    "(scheduler/scheduler_config.json), or set pipe.scheduler before the pipeline is loaded"
)
ELSEWHERE = {
    **dict.fromkeys(("scheduler", "sampler", "sampler_name", "scheduler_name"), _SCHEDULER),
    **dict.fromkeys(("size", "resolution"), "say width and height, in pixels"),
    **dict.fromkeys(("seconds", "duration"), "say num_frames, which is seconds x frames a second"),
    **dict.fromkeys(("dtype", "torch_dtype", "device"), "it is a setting of the server or engine"),
}
HIDDEN = (*INSTEAD, "return_dict")  # outputs are always objects, whatever it says


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a pipeline's `__call__`."""

    name: str
    kind: ParameterKind  # "other": tensors, pictures, callables: Python API only
    required: bool = False
    default: int | float | bool | str | None = None  # the pipeline's own, where it is plain
    also: tuple[ParameterKind, ...] = ()  # further kinds that it takes
    takes_none: bool = True


@dataclass(frozen=True, slots=True)
class Task:
    """One of the things that a model does, and the pipeline that does it."""

    name: str  # "text-to-image", "inpaint", ...
    pipeline: str  # class name
    parameters: tuple[Parameter, ...]
    max_images: int = 1  # reference images of a request
    image_mode: str = "RGB"  # of PIL images
    strength_rounds: Literal["up", "down"] | None = None  # steps * strength; None: not known
    output_types: tuple[str, ...] = ("pil", "np", "pt", "latent")
    only_converts: bool = False  # pictures are the same in all output types
    needs_prompt: bool = True  # a prompt, or its embeddings

    @property
    def makes(self) -> Literal["pictures", "videos", "sound"]:
        kinds: dict[str, Literal["videos", "sound"]] = {"video": "videos", "audio": "sound"}
        return kinds.get(self.name.rpartition("-")[2], "pictures")

    def takes(self, name: str) -> bool:
        return any(parameter.name == name for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class Card:
    """A loaded model as its clients see it."""

    id: str
    tasks: tuple[Task, ...]  # the loaded pipeline's own first
    defaults: dict[str, Any]  # laid under what a request leaves out
    size_multiple_px: int
    default_size_px: tuple[int, int] | None  # width, height
    max_pixels: int
    max_steps: int
    lora: tuple[str, ...] = ()  # adapters that a request may name
    frame_step: int = 1  # videos have k * frame_step + 1 frames
    rounds_sizes: bool = False  # sides that are no multiple are made smaller, not refused

    @property
    def pipeline(self) -> str:
        return self.tasks[0].pipeline

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.tasks[0].parameters

    @property
    def usual_size_px(self) -> tuple[int, int] | None:
        """Width and height where nobody says any, if the model or its pipeline tells."""
        own = {p.name: p.default for p in self.parameters} | self.defaults
        width, height = own.get("width"), own.get("height")
        if self.default_size_px or not isinstance(width, int) or not isinstance(height, int):
            return self.default_size_px
        return width, height

    def task(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)

    def task_for(self, given: Iterable[str]) -> Task:
        """The task that takes the pictures given; the model's own where none does."""
        pictures = [name for name in given if name in PICTURE_NAMES]
        fitting = (task for task in self.tasks if all(map(task.takes, pictures)))
        return next(fitting, self.tasks[0])

    def steps(self, arguments: Mapping[str, Any]) -> int:
        """Denoising steps that these arguments ask for; 0 where the pipeline does not say."""
        own = {p.name: p.default for p in self.parameters}.get("num_inference_steps")
        return int(arguments.get("num_inference_steps", own) or 0)

    def names(self) -> list[str]:
        """What a request may say, ours included."""
        hidden = HIDDEN
        names = dict.fromkeys(p.name for task in self.tasks for p in task.parameters)
        return [*OURS, *(name for name in names if name not in hidden)]


def check(card: Card, request: Request, *, from_json: bool = False) -> CheckedRequest:
    """Turn a request into a job, or say what is wrong with it.

    Args:
        card: of the model that is to run it.
        request: as the caller wrote it.
        from_json: it came over HTTP, where no tensors or callables can.

    Raises:
        Rejected: names what was seen, the rule, and the nearest thing that works.
    """
    given = dict(request.parameters)
    if request.prompt is not None:
        given["prompt"] = request.prompt
    riding = check_lora(given.pop("lora", None), card.lora)
    deadline_s, priority = given.pop("deadline_s", None), given.pop("priority", None)
    step_cache = given.pop("step_cache", None)
    task = card.task_for(name for name, value in given.items() if value is not None)
    known = {parameter.name: parameter for parameter in task.parameters}
    arguments = {name: value for name, value in card.defaults.items() if name in known}
    for name, value in given.items():
        if name in HIDDEN and (value is None or name == "return_dict" or _is_one(name, value)):
            continue
        if name in INSTEAD:
            raise UnsupportedParameter(f"{name} is not taken: {INSTEAD[name]}", param=name)
        if value is None and (name not in known or _is_left_out(known[name], from_json)):
            if not any(one.takes(name) for one in card.tasks):
                raise _unknown(card, task, name, from_json)
            continue
        if name not in known:
            raise _unknown(card, task, name, from_json)
        refuse_scale(name, value)
        arguments[name] = None if value is None else _value(task, known[name], value, from_json)
    _check_texts({name: value for name, value in arguments.items() if name in given})
    if "negative_prompt" in known and arguments.get("negative_prompt_embeds") is not None:
        arguments.setdefault("negative_prompt", None)  # SANA's own is "", and refused beside them
    _check_rules(card, arguments)
    _check_strength(task, arguments)
    check_pictures(
        arguments,
        mode=task.image_mode,
        most=task.max_images,
        least_px=card.size_multiple_px,
        max_pixels=card.max_pixels,
    )
    missing = [p.name for p in task.parameters if p.required and p.name not in arguments]
    has_prompt = any(arguments.get(name) is not None for name in ("prompt", "prompt_embeds"))
    if "prompt" in known and task.needs_prompt and not has_prompt:
        missing.append("prompt")
    if missing:
        raise MissingParameter(
            f"{missing[0]} is missing: every request needs one", param=missing[0]
        )
    return CheckedRequest(
        request_id=request.request_id,
        seed=check_seed(request.seed),
        arguments=arguments,
        timeout_s=None if request.timeout_s is None else check_timeout(request.timeout_s),
        task=task.name,
        lora=riding,
        deadline_s=None if deadline_s is None else check_timeout(deadline_s, "deadline_s"),
        priority=0 if priority is None else check_priority(priority),
        tenant=request.tenant,
        user=request.user,
        output_type="pil" if from_json else None,
        step_cache=None if step_cache is None else check_step_cache(step_cache),
    )


def _is_one(name: str, value: Any) -> bool:
    return name in PER_PROMPT and is_int(value) and value == 1


def _is_left_out(parameter: Parameter, from_json: bool) -> bool:
    """Whether None is as if the parameter had not been said.

    Clients write null for what they leave out, and a number without which the pipeline fails is
    not what they mean. In Python None is the caller's own.
    """
    if parameter.name == "output_type":
        return True
    return from_json and parameter.kind in ("int", "float", "bool") and not parameter.takes_none


def _unknown(card: Card, task: Task, name: str, from_json: bool) -> UnknownParameter:
    others = [other for other in card.tasks if other.takes(name)]
    if others:  # as `strength` without a picture
        pictures = [p.name for p in others[0].parameters if p.name in PICTURE_NAMES]
        hint = f": {others[0].name} takes it, with {' and '.join(pictures) or 'other inputs'}"
    elif name.lower() in ELSEWHERE:
        hint = f": {ELSEWHERE[name.lower()]}"
    else:
        names = [n for n in card.names() if not (from_json and n == "output_type")]
        called = (n for n in OTHER_NAMES.get(name.lower(), ()) if task.takes(n))
        known = next(called, None) or (name.lower() if name.lower() in names else None)
        hint = f"; did you mean {known!r}?" if known else nearest(name, names)
    return UnknownParameter(f"{task.pipeline} has no parameter {name!r}{hint}", param=name)


def _value(task: Task, parameter: Parameter, value: Any, from_json: bool) -> Any:
    name, kind, kinds = parameter.name, parameter.kind, (parameter.kind, *parameter.also)
    value = as_plain(value, also_arrays="other" not in kinds)
    if name == "prompt" and isinstance(value, Sequence) and not isinstance(value, str):
        raise InvalidValue(
            f"prompt is a list of {len(value)}: send one request for each prompt (in Python, "
            "generate([...]) does)",
            param="prompt",
        )
    rule = KINDS[kind][1]
    fits = any(KINDS[one][0](value) for one in kinds) or ("other" in kinds and not from_json)
    if name == "output_type":
        fits, rule = value in task.output_types, f"one of {', '.join(task.output_types)}"
        if from_json:
            instead = "a video is an MP4 file" if task.makes == "videos" else "use output_format"
            raise UnsupportedParameter(f"output_type is not taken: {instead}", param=name)
    if fits:
        return float(value) if kind == "float" and is_int(value) else value
    if kind == "other":
        raise UnsupportedParameter(f"{name} cannot be sent as JSON", param=name)
    raise InvalidValue.of(name, value, f"must be {rule}")


def _check_texts(arguments: Mapping[str, Any]) -> None:
    """Bound all texts: a tokenizer reads the whole of one before it cuts it to what fits."""
    sizes = {name: sum(map(len, _texts(value))) for name, value in arguments.items()}
    for name, size in sizes.items():
        if size > MOST_TEXT:
            rule = f"must have at most {MOST_TEXT}"
            raise InvalidValue(f"{name} has {size} characters: {rule}", param=name)
    if (size := sum(sizes.values())) > MOST_TEXTS:
        longest = sorted(sizes, key=lambda name: -sizes[name])
        said = " and ".join(name for name in longest if sizes[name])
        raise InvalidValue(
            f"{said} have {size} characters together: must have at most {MOST_TEXTS}",
            param=longest[0],
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])


def _check_rules(card: Card, arguments: Mapping[str, Any]) -> None:
    """Rules that hold for every pipeline, so that nobody waits in line to be told."""
    steps = arguments.get("num_inference_steps")
    if steps is not None and not 1 <= steps <= card.max_steps:
        raise InvalidValue.of(
            "num_inference_steps", steps, f"must be a whole number from 1 to {card.max_steps}"
        )
    for name in ("sigmas", "timesteps"):  # one entry a step
        given = arguments.get(name)
        if isinstance(given, (list, tuple)) and not 1 <= len(given) <= card.max_steps:
            rule = f"must have from 1 to {card.max_steps} entries"
            raise InvalidValue(f"{name} has {len(given)} entries: {rule}", param=name)
    strength = arguments.get("strength")
    if strength is not None and is_number(strength) and not 0 <= strength <= 1:
        raise InvalidValue.of("strength", strength, "must be from 0 to 1")
    for name in ("max_sequence_length", "num_frames"):
        value = arguments.get(name)
        if value is not None and value < 1:
            raise InvalidValue.of(name, value, "must be at least 1")
    check_size(card, arguments)


def _check_strength(task: Task, arguments: Mapping[str, Any]) -> None:
    """Refuse a strength that leaves nothing to do, counted as diffusers' `get_timesteps` does."""
    said = {p.name: p.default for p in task.parameters} | dict(arguments)
    strength, steps = said.get("strength"), said.get("num_inference_steps")
    for name in ("sigmas", "timesteps"):
        steps = len(said[name]) if isinstance(said.get(name), (list, tuple)) else steps
    if task.strength_rounds is None or not is_number(strength) or not steps:
        return
    is_rounded_up = task.strength_rounds == "up"
    if is_rounded_up and int(max(steps - min(steps * strength, steps), 0)) < steps:
        return
    if not is_rounded_up and int(steps * strength) >= 1:
        return
    least = f"{math.ceil(10_000 / steps) / 10_000:g}"  # in digits that can be read
    rule = f"must be above 0, such as {least}" if is_rounded_up else f"must be at least {least}"
    raise InvalidValue.of("strength", strength, f"leaves none of {steps} steps, {rule}")


def rounded_size(card: Card, arguments: Mapping[str, Any]) -> str | None:
    """What a client is to know of a size that the pipeline rounds down; None if it does not."""
    sides, multiple = _sides(card, arguments), card.size_multiple_px
    if not any(side % multiple for side in sides):
        return None
    drawn = [side // multiple * multiple for side in sides]
    return f"size {_by(sides)} was rounded down to {_by(drawn)}, multiples of {multiple}"


def _sides(card: Card, arguments: Mapping[str, Any]) -> list[int]:
    """Width and height, as far as they are known."""
    default = card.usual_size_px or (None, None)
    return [
        side
        for name, other in zip(("width", "height"), default, strict=True)
        if (side := other if arguments.get(name) is None else arguments[name]) is not None
    ]


def check_size(card: Card, arguments: Mapping[str, Any]) -> None:
    """Refuse a size that the pipeline would refuse, or that has too many pixels."""
    sides, multiple = _sides(card, arguments), card.size_multiple_px
    least = multiple if card.rounds_sizes else 1
    if any(side < least or (side % multiple and not card.rounds_sizes) for side in sides):
        legal = [max(multiple, round(side / multiple) * multiple) for side in sides]
        raise SizeRejected(
            f"size {_by(sides)} is not supported: both sides must be multiples of {multiple}, "
            f"above 0; the nearest size is {_by(legal)}",
            param="size",
        )
    if len(sides) == 2 and math.prod(sides) > card.max_pixels:
        longest = card.max_pixels // multiple // multiple * multiple
        fits = [min(side, longest) for side in within(sides, card.max_pixels, multiple)]
        raise SizeRejected(
            f"size {_by(sides)} is not supported: it has {math.prod(sides)} pixels, the most "
            f"is {card.max_pixels}; the nearest size of this shape is {_by(fits)}",
            param="size",
        )


def within(size: Sequence[int], max_pixels: int, multiple: int) -> tuple[int, int]:
    """The largest size of about this shape, and not above it, that a model can do."""
    shrink = min(1.0, math.sqrt(max_pixels / math.prod(size)))
    width, height = (max(multiple, int(side * shrink) // multiple * multiple) for side in size)
    return width, height


def _by(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))
