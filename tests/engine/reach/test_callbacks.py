"""Callbacks and helpers that requests bring: which keep their request from a shared ride."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from support.reach import Cases, judge, stepping

PIPE = stepping()
OTHER: Any = None
BOX: dict[str, Any] = {"pipe": PIPE}
STEPS: list[int] = []
cases = Cases()  # callbacks, or functions without parameters that give one


class Helper:
    def __init__(self, pipe: Any = None) -> None:
        self.pipe, self.n, self.lock = pipe, 0, None

    def callback(self, pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        kwargs["latents"] = kwargs["latents"] * 2
        return kwargs

    def counting(self, pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        self.n += 1
        return {}

    def reading(self, pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        return {"latents": kwargs["latents"] * len(self.pipe.scheduler.timesteps)}


class Calling:
    def __call__(self, pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        pipe._guidance_scale = 1.0
        return kwargs


class CallingAndCounting(Calling):
    n = 0

    def __call__(self, pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        self.n += 1
        return super().__call__(pipe, i, t, kwargs)


class Cutoff(PipelineCallback):  # type: ignore[misc]
    tensor_inputs = ["latents"]

    def callback_fn(self, pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        pipe._guidance_scale = 0.0
        return kwargs


class Leaking(Cutoff):
    def callback_fn(self, pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        STEPS.append(i)
        return kwargs


@cases.clean
def changes_latents(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    kwargs["latents"] = kwargs["latents"] * 1.01
    kwargs["latents"][0] += 1
    kwargs.update(more=1)
    return kwargs


@cases.clean
def changes_the_pipeline_it_is_given(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    pipe._interrupt = i == 1
    pipe._guidance_scale = 1.5
    pipe.scheduler.timesteps[0] = 3
    pipe._num_timesteps += 1
    return {}


@cases.clean
def stops_by_itself(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    if i > 2:
        raise StopIteration
    return {}


@cases.private("the pipeline itself as `PIPE`")
def stops_the_pipeline_by_its_global_name(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    PIPE._interrupt = True
    return {}


@cases.private("the pipeline itself")
def reads_the_pipeline_in_a_dictionary(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    return {"latents": kwargs["latents"] * (BOX["pipe"].scheduler.step_index or 0)}


@cases.private("`STEPS.append`")
def reports_to_a_list(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    STEPS.append(i)
    return {}


@cases.private("writes `pipe.net.scale` on the module Net")
def writes_on_a_module(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    pipe.net.scale = 2.0
    return {}


@cases.private("pipe.net.first.weight")
def writes_on_weights(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    pipe.net.first.weight.data.zero_()
    return {}


@cases.private("on the class Mine")
def writes_on_the_class(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    type(pipe).last = t
    return {}


@cases.private("pipe.net.set_adapters")
def sets_adapters(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    pipe.net.set_adapters(["a"])
    return {}


@cases.private("load_lora_weights")
def loads_adapters(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    pipe.load_lora_weights("x")
    return {}


def _closure(value: Any) -> Callable[..., Any]:
    def callback(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        value._interrupt = True
        return {}

    return callback


def _reader(value: Any) -> Callable[..., Any]:
    def callback(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        return {"latents": kwargs["latents"] * value["scale"]}

    return callback


def _default(pipe: Any, i: int, t: Any, kwargs: Any, target: Any = PIPE) -> Any:
    target._interrupt = True
    return {}


def _keyword(pipe: Any, i: int, t: Any, kwargs: Any, *, target: Any = PIPE) -> Any:
    target._interrupt = True
    return {}


def _first(target: Any, pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
    target._interrupt = True
    return {}


def _decorated(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


BROUGHT: dict[str, tuple[Any, str]] = {
    "closure over the pipeline": (_closure(PIPE), "the pipeline itself as `value`"),
    "closure over its scheduler": (_closure(PIPE.scheduler), "DDIMScheduler"),
    "closure over plain data": (_reader({"scale": 2.0}), ""),
    "default": (_default, "the pipeline itself"),
    "keyword default": (_keyword, "the pipeline itself"),
    "partial": (functools.partial(_first, PIPE), "the pipeline itself"),
    "clean partial": (functools.partial(changes_latents), ""),
    "decorated": (_decorated(_closure(PIPE)), "the pipeline itself"),
    "clean and decorated": (_decorated(changes_latents), ""),
    "decorated twice": (_decorated(_decorated(reports_to_a_list)), "`STEPS.append`"),
    "method of the pipeline": (PIPE.step, "the pipeline itself"),
    "method": (Helper().callback, ""),
    "method of an owner that counts": (Helper().counting, "`Helper.counting` writes `self.n`"),
    "method of an owner that has the pipeline and does not use it": (Helper(PIPE).callback, ""),
    "method that reads the pipeline": (Helper(PIPE).reading, "the pipeline itself"),
    "object": (Calling(), ""),
    "object that counts": (CallingAndCounting(), "writes `self.n`"),
    "callback of diffusers": (Cutoff(), ""),
    "callback of diffusers that leaks": (Leaking(), "`STEPS.append`"),
    "callbacks of diffusers": (MultiPipelineCallbacks([Cutoff(), Leaking()]), "`STEPS.append`"),
    "lambda": (lambda pipe, i, t, kwargs: {}, ""),
    "lambda with the pipeline": (lambda pipe, i, t, kwargs: PIPE, "the pipeline itself"),
    "builtin": (dict, ""),
    "None": (None, ""),
}


@pytest.mark.parametrize(
    ("callback", "reason"), cases.all, ids=lambda one: getattr(one, "__name__", "")
)
def test_a_callback_is_private_where_it_reaches_past_its_arguments(
    callback: Any, reason: str
) -> None:
    judge(reason, PIPE, callback_on_step_end=callback)


@pytest.mark.parametrize("name", BROUGHT)
def test_owners_closures_and_defaults_of_callbacks_are_reached(name: str) -> None:
    callback, reason = BROUGHT[name]

    judge(reason, PIPE, callback_on_step_end=callback)


def test_what_a_callback_reaches_is_looked_at_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def callback(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        OTHER._interrupt = True
        return {}

    def harmless(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        return {"latents": kwargs["latents"] * (OTHER is None)}

    judge("", PIPE, callback_on_step_end=harmless)
    monkeypatch.setitem(globals(), "OTHER", PIPE)
    judge("the pipeline itself as `OTHER`", PIPE, callback_on_step_end=callback)
    judge("the pipeline itself as `OTHER`", PIPE, callback_on_step_end=harmless)


def test_the_reasons_of_one_request_are_not_those_of_the_next() -> None:
    judge("the pipeline itself", PIPE, callback_on_step_end=_default)
    judge("", PIPE, callback_on_step_end=changes_latents)
    judge("", PIPE, prompt="a cat", num_inference_steps=3)


class Controller:
    """An object that a pipeline takes as an argument and calls."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def between_steps(self) -> None:
        self.step = 1


class Global(Controller):
    def between_steps(self) -> None:
        STEPS.append(1)


@pytest.mark.parametrize(
    ("helper", "reason"),
    [
        (Controller(), ""),
        (Controller(values=[1, 2], names={"a": 1}), ""),
        (Controller(pipe=PIPE), "the argument `helper` holds the pipeline itself"),
        (Controller(parts=[{"pipe": PIPE}]), "the pipeline itself"),
        (Controller(lock=threading.Lock()), "which blocks"),
        (Global(), "`STEPS.append`"),
        ([Global()], "`STEPS.append`"),
        ({"a": Global()}, "`STEPS.append`"),
        (lambda net: net.weight.mul_(2), "mul_"),
        (lambda net: setattr(net, "gain", 3.0), "setattr"),
        (lambda x: x + 1, ""),
    ],
)
def test_objects_that_a_request_brings_are_walked(helper: Any, reason: str) -> None:
    judge(reason, PIPE, helper=helper)
