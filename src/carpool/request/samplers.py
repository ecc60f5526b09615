"""Samplers by name: diffusers' classes, and their names in AUTOMATIC1111, ComfyUI, k-diffusion.

A name is a sampler, optionally followed by a noise schedule: `dpmpp_2m_karras`, "DPM++ 2M Karras".
The table is from diffusers' page on schedulers; a model offers the compatible ones.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from carpool.errors import InvalidValue, nearest

SOLVERS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {  # classes, options
    "euler": (("EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"), {}),
    "euler_a": (("EulerAncestralDiscreteScheduler",), {}),
    "heun": (("HeunDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"), {}),
    "lms": (("LMSDiscreteScheduler",), {}),
    "dpm_2": (("KDPM2DiscreteScheduler",), {}),
    "dpm_2_a": (("KDPM2AncestralDiscreteScheduler",), {}),
    "dpmpp_2m": (("DPMSolverMultistepScheduler",), {"algorithm_type": "dpmsolver++"}),
    "dpmpp_2m_sde": (("DPMSolverMultistepScheduler",), {"algorithm_type": "sde-dpmsolver++"}),
    "dpmpp_sde": (("DPMSolverSinglestepScheduler",), {}),
    "ddim": (("DDIMScheduler",), {}),
    "ddpm": (("DDPMScheduler",), {}),
    "pndm": (("PNDMScheduler",), {}),
    "plms": (("PNDMScheduler",), {"skip_prk_steps": True}),
    "deis": (("DEISMultistepScheduler",), {}),
    "uni_pc": (("UniPCMultistepScheduler",), {}),
    "lcm": (("LCMScheduler", "FlowMatchLCMScheduler"), {}),
    "tcd": (("TCDScheduler",), {}),
}
SCHEDULES: Mapping[str, Mapping[str, Any]] = {  # the first option identifies the schedule
    "": {},
    "karras": {"use_karras_sigmas": True},
    "exponential": {"use_exponential_sigmas": True, "timestep_spacing": "linspace"},
    "beta": {"use_beta_sigmas": True, "timestep_spacing": "linspace"},
    "sgm_uniform": {"timestep_spacing": "trailing"},
    "simple": {"timestep_spacing": "trailing"},
    "normal": {"use_karras_sigmas": False},
}
SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")  # mutually exclusive
_OTHER_NAMES = {"eulerancestral": "eulera", "dpm2ancestral": "dpm2a", "unipcbh2": "unipc"}
_AUTOMATIC = "automatic"  # AUTOMATIC1111's name of a sampler's default schedule


@dataclass(frozen=True, slots=True)
class NamedSampler:
    """A solver of diffusers with options of its configuration."""

    classes: tuple[str, ...]
    options: Mapping[str, Any]
    required: frozenset[str]  # options that define the sampler


def _all() -> dict[str, NamedSampler]:
    samplers = {}
    for name, (classes, options) in SOLVERS.items():
        for schedule, schedule_options in SCHEDULES.items():
            required = frozenset([*options, *list(schedule_options)[:1]])
            full = f"{name}_{schedule}" if schedule else name
            samplers[full] = NamedSampler(classes, {**options, **schedule_options}, required)
    for cls in sorted({cls for classes, _ in SOLVERS.values() for cls in classes}):
        samplers[cls] = NamedSampler((cls,), {}, frozenset())
    return samplers


SAMPLERS = _all()


def plain(name: str) -> str:
    """Normalize a name across programs: "DPM++ 2M Karras" becomes `dpmpp2mkarras`."""
    text = re.sub(r"[^a-z0-9]", "", name.lower().replace("++", "pp"))
    text = text.removeprefix("sample").removesuffix("gpu").removesuffix(_AUTOMATIC)
    for spelling, standard in _OTHER_NAMES.items():
        if text.removeprefix("k").startswith(spelling):
            text = standard + text.removeprefix("k").removeprefix(spelling)
    return text


def check_scheduler(name: Any, offered: Collection[str], default: str) -> str | None:
    """Map a request's sampler to its name here.

    Args:
        name: None for the model's own scheduler.
        offered: the model's samplers; empty if its scheduler cannot be replaced.
        default: the class of the model's own scheduler.

    Returns:
        None for the model's own scheduler.

    Raises:
        InvalidValue: the model offers no such sampler.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidValue.of("scheduler", name, "must be the name of a sampler")
    text = plain(name)
    if text in ("", plain(default)):
        return None
    by_text = {plain(sampler): sampler for sampler in offered}
    match = by_text.get(text) or by_text.get(text.removeprefix("k"))
    if match is not None:
        return match
    rule = f"the model's own scheduler, {default}, cannot be replaced"
    rule = rule if default else "the model has no replaceable scheduler"
    if offered:
        is_sampler = any(text == plain(sampler) for sampler in SAMPLERS)
        why = f"{default} is not compatible with it, or a library that it needs is missing"
        why = why if is_sampler else "there is no such sampler"
        rule = f"{why}{nearest(name, offered)}: GET /v1/models lists all (`schedulers`)"
    raise InvalidValue(f"scheduler={name[:80]!r}: {rule}", param="scheduler")
