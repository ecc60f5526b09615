"""Find arguments that had no effect on a request's output, by observing its run.

The pipeline's formulas are unknown, but an argument with an effect leaves marks: a text is
tokenized, a variable is read, the scheduler's `step` has a parameter for it. The pipeline itself
reports whether it guides. Without such marks there is no warning: a wrong warning is worse than
none.
"""

import dis
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

from carpool.engine.foreign_code import is_of_a_library
from carpool.engine.intercept import Call
from carpool.engine.lora_scale import has_lora_layers, takes_scale
from carpool.engine.nested import leaves_in
from carpool.request.card import Card, Task
from carpool.request.images import NAMES as PICTURES
from carpool.request.lora import ATTENTION

log = logging.getLogger("carpool")

MOST_TEXTS = 64  # tokenized texts recorded per request; beyond that, all texts count as read
_NEGATIVE = re.compile(r"negative_prompt(_\d+)?")
_SIZES = "negative_original_size", "negative_target_size"
_NEEDS = {  # arguments that diffusers ignores without others
    **dict.fromkeys((*_SIZES, "negative_crops_coords_top_left"), _SIZES),
    **{f"skip_layer_guidance_{n}": ("skip_guidance_layers",) for n in ("scale", "start", "stop")},
    "negative_pooled_prompt_embeds": ("negative_prompt_embeds",),
}  # fmt: skip
_OFF, _MASKS = "guidance is off for this request", "ip_adapter_masks"
_SOURCES = (*PICTURES, "video", "latents", "image_latents", "conditions", "reference_image")
"""Arguments to which `strength` may apply."""


class EffectObserver:
    """Observes one request, and finds its arguments without effect.

    Args:
        arguments: arguments of the pipeline's `__call__`; the model's defaults are ignored.
    """

    def __init__(self, card: Card, task: Task, arguments: Mapping[str, Any]) -> None:
        defaults = {parameter.name: parameter.default for parameter in task.parameters}
        self._task, self._values = task, {**defaults, **arguments}
        self.arguments = {
            name: value
            for name, value in arguments.items()
            if value is not None and not _is(value, defaults.get(name), card.defaults.get(name), "")
        }
        self.texts: list[str] = []  # texts tokenized for the request
        self._is_guided: bool | None = None  # None: the pipeline does not report it
        self._is_embedded: bool | None = None  # guidance is an input of the denoiser
        self._takes_eta, self.has_begun = True, False

    def tokenizes(self, value: Any) -> None:
        """Record tokenized texts, in nested lists and dicts."""
        if len(self.texts) < MOST_TEXTS:
            self.texts += leaves_in(value, str)

    def denoises(self, pipe: Any, call: Call) -> None:
        """Inspect the pipeline at the first call of its denoiser."""
        self.has_begun = True
        guidance = getattr(pipe, "do_classifier_free_guidance", None)
        guidance = getattr(getattr(pipe, "guider", None), "_enabled", guidance)
        self._is_guided = guidance if isinstance(guidance, bool) else None
        config = getattr(call.target.module, "config", None)
        config = config if isinstance(config, Mapping) else {}  # transformers' is an object
        if "guidance_embeds" in config or config.get("time_cond_proj_dim") is not None:
            self._is_embedded = bool(config.get("guidance_embeds", True))
        scheduler = getattr(pipe, "scheduler", None)
        if hasattr(pipe, "prepare_extra_step_kwargs") and scheduler is not None:
            self._takes_eta = _uses(scheduler.step, "eta")

    def warn(self, pipe: Any, warnings: list[str], request_id: str) -> None:
        """Add a warning for each argument that had no effect, unless a warning already names it."""
        for name, reason in self.reasons(pipe):
            if not any(name in re.findall(r"\w+", warning) for warning in warnings):
                warnings.append(f"{name} had no effect: {reason}")
                log.warning("request %s: %s", request_id, warnings[-1])

    def reasons(self, pipe: Any) -> Iterator[tuple[str, str]]:
        """Yield each argument that had no effect, and why."""
        cls: type = type(pipe)
        unread = unread_parameters(cls) if self.arguments else frozenset()
        steps = self.arguments.get("sigmas", self.arguments.get("timesteps"))
        for name, value in self.arguments.items():
            is_guidance = name == "guidance_rescale" or name.startswith("negative_")
            needed = [n for n in _NEEDS.get(name, ()) if self._values.get(n) is None]
            if name in unread:
                yield name, "the pipeline does not read it"
            elif (is_guidance and self._is_guided is False) or not self._reads(name, value):
                yield name, self._unguided()
            elif needed:
                yield name, f"it needs {' and '.join(needed)}"
            elif name == "num_inference_steps" and isinstance(steps, list) and len(steps) != value:
                yield name, "the request's sigmas or timesteps set the steps"
            elif name == "guidance_scale" and not self._takes_guidance(value):
                yield name, "the pipeline does not use it with this model"
            elif name == "true_cfg_scale" and self._lacks_negative(pipe, value):
                yield name, "it needs a negative_prompt"
            elif name == "eta" and not self._takes_eta:
                yield name, f"{type(pipe.scheduler).__name__} takes none"
            elif name == "strength" and not any(source in self.arguments for source in _SOURCES):
                yield name, "it needs an input image, and there is none"
            elif name.endswith("aesthetic_score") and not pipe.config["requires_aesthetics_score"]:
                yield name, "only the refiner reads it"
            elif name.startswith("ip_adapter_image") and not _ip_adapters(pipe):
                yield name, "the pipeline has no IP-adapter"
            elif name in ATTENTION and value and not _is_read_by_modules(pipe, value):
                yield name, "no module or LoRA layer of the pipeline uses it"

    def _reads(self, name: str, negative: Any) -> bool:
        if not _NEGATIVE.fullmatch(name) or not isinstance(negative, str):
            return True
        words = re.findall(r"\w+", negative.casefold())
        if not (words and self.texts) or len(self.texts) >= MOST_TEXTS:
            return True  # unknown: assume it is read
        texts = [set(re.findall(r"\w+", text.casefold())) for text in self.texts]
        return any(2 * sum(word in tokens for word in words) >= len(words) for tokens in texts)

    def _unguided(self) -> str:
        off = "the pipeline did not read it" if self._is_guided else _OFF
        for name in ("true_cfg_scale", "guidance_scale"):
            if self._task.takes(name):
                value = self._values.get(name)
                is_off = isinstance(value, (int, float)) and value <= 1
                return f"{off}: {name} above 1 switches it on" if is_off else off
        return off

    def _takes_guidance(self, scale: Any) -> bool:
        if self._is_embedded or not isinstance(scale, (int, float)) or scale <= 1:
            return True
        if self._is_guided is not None:
            return self._is_guided
        is_embedded_only = self._task.takes("true_cfg_scale") or not any(
            _NEGATIVE.fullmatch(parameter.name) for parameter in self._task.parameters
        )
        return not (self._is_embedded is False and is_embedded_only)

    def _lacks_negative(self, pipe: Any, scale: Any) -> bool:
        code = getattr(inspect.unwrap(type(pipe).__call__), "__code__", None)
        names = ("negative_prompt", "negative_prompt_embeds")
        is_known = code is not None and "do_true_cfg" in code.co_varnames
        is_on = isinstance(scale, (int, float)) and scale > 1
        return is_known and is_on and all(self._values.get(name) is None for name in names)


def _ip_adapters(pipe: Any) -> list[Any]:
    """The attention processors of IP-adapters in the denoiser."""
    denoiser = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
    processors = getattr(denoiser, "attn_processors", {}).values()
    return [processor for processor in processors if "IP" in type(processor).__name__]


def _uses(method: Any, name: str) -> bool:
    """Whether a method takes a parameter and reads it; unknown code counts as reading it."""
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    is_taken = name in inspect.signature(method).parameters
    return is_taken and (code is None or name not in code.co_varnames or name in set(_read(code)))


def _is_read_by_modules(pipe: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a component's `forward` reads attention kwargs; unknown code counts as reading."""
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    if "scale" in kwargs and any(map(has_lora_layers, modules)):
        return True
    idle = set() if any(_uses(p.__call__, _MASKS) for p in _ip_adapters(pipe)) else {_MASKS}
    for cls in {type(module) for module in modules}:
        unscaled = set(kwargs) - idle - ({"scale"} if takes_scale(cls) else set())
        code = getattr(inspect.unwrap(cls.forward), "__code__", None)
        read = set(_read(code)) if code is not None and is_of_a_library(cls) else set(ATTENTION)
        if unscaled and not read.isdisjoint(ATTENTION):
            return True
    return False


@lru_cache(256)
def unread_parameters(cls: type) -> frozenset[str]:
    """The parameters of a pipeline's `__call__` that its code never reads."""
    code = getattr(inspect.unwrap(cls.__call__), "__code__", None)
    if code is None or not is_of_a_library(cls):  # other code may use `locals`
        return frozenset()
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return frozenset(names).difference(_read(code))


def _read(code: CodeType) -> Iterator[Any]:
    for instruction in dis.get_instructions(code):
        if "LOAD" in instruction.opname:
            names = instruction.argval
            yield from names if isinstance(names, tuple) else [names]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read(constant)


def _is(value: Any, *values: Any) -> bool:
    """Whether a plain value equals one of the others."""
    plain = (bool, int, float, str)
    return isinstance(value, plain) and value in [v for v in values if isinstance(v, plain)]
