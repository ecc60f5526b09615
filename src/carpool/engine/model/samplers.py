"""Another sampler for one request: a diffusers scheduler with the model's configuration."""

import copy
import inspect
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import diffusers
from diffusers import SchedulerMixin
from diffusers.utils import is_scipy_available

from carpool.errors import InvalidValue
from carpool.request.samplers import SAMPLERS, SIGMAS, NamedSampler

_MUST_SUPPORT = ("use_flow_sigmas", "rescale_betas_zero_snr")
"""Configuration entries about the model's training that a class has to support."""


def offered(pipe: Any) -> tuple[str, ...]:
    """The names of the samplers that can replace a pipeline's own scheduler."""
    scheduler = vars(pipe).get("scheduler")
    if not isinstance(scheduler, SchedulerMixin):
        return ()
    return tuple(name for name in SAMPLERS if _class_for(scheduler, name) is not None)


def exchanged(scheduler: Any, name: str) -> Any:
    """Create a scheduler, like diffusers' `CLASS.from_config(pipe.scheduler.config, **options)`.

    Args:
        scheduler: the model's own.
        name: one of `offered`.

    Raises:
        InvalidValue: the model's scheduler is not compatible with it.
    """
    return copy.deepcopy(_made(scheduler, name))


@lru_cache(32)  # some constructors compute a thousand timesteps
def _made(scheduler: Any, name: str) -> Any:
    cls = _class_for(scheduler, name)
    if cls is None:
        rule = f"{type(scheduler).__name__} is not compatible with it"
        raise InvalidValue(f"scheduler={name!r}: {rule}", param="scheduler")
    takes = _parameters(cls)
    entries = scheduler.config.items()
    config = {key: value for key, value in entries if key in takes or key[0] == "_"}
    return cls.from_config(config, **_options(SAMPLERS[name], takes))


def _class_for(scheduler: Any, name: str) -> Any:
    """The class of a sampler that supports the model's configuration and the sampler's options."""
    sampler = SAMPLERS[name]
    if "use_beta_sigmas" in sampler.required and not is_scipy_available():
        return None
    classes = [getattr(diffusers, cls, None) for cls in sampler.classes]
    fitting = (cls for cls in classes if cls is not None and _fits(scheduler, cls))
    return next((cls for cls in fitting if sampler.required <= _parameters(cls).keys()), None)


def _fits(scheduler: Any, cls: Any) -> bool:
    """Whether a class accepts the configuration, and supports the model's training."""
    is_missing = hasattr(cls, "_backends")  # diffusers' placeholder if a library is not installed
    if is_missing or not (cls is type(scheduler) or cls in scheduler.compatibles):
        return False
    return all(name in _parameters(cls) for name in _MUST_SUPPORT if scheduler.config.get(name))


@cache
def _parameters(cls: Any) -> Mapping[str, Any]:
    return inspect.signature(cls.__init__).parameters


def _options(sampler: NamedSampler, takes: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in sampler.options.items() if name in takes}
    if any(name in options for name in SIGMAS):
        options = {name: False for name in SIGMAS if name in takes} | options
    return options
