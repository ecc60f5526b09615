"""Callbacks and helpers that requests bring: which keep their request from a shared ride."""

import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from PIL import Image

from support.pictures import png
from support.reach import judge, stepping, written

PIPE = stepping()
OTHER: Any = None
BOX: dict[str, Any] = {"pipe": PIPE}
STEPS: list[int] = []
callbacks = functools.partial(written, globals(), arguments="pipe, i, t, kwargs", answer="kwargs")


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


CLEAN = callbacks("""
changes_latents:
    kwargs["latents"] = kwargs["latents"] * 1.01
    kwargs["latents"][0] += 1
    kwargs.update(more=1)
changes_the_pipeline_it_is_given:
    pipe._interrupt = i == 1
    pipe._guidance_scale = 1.5
    pipe.scheduler.timesteps[0] = 3
    pipe._num_timesteps += 1
    return {}
stops_by_itself:
    if i > 2:
        raise StopIteration
""")
PRIVATE = callbacks("""
stops_the_pipeline_by_its_global_name: PIPE._interrupt = True
reads_the_pipeline_in_a_dictionary:
    return {"latents": kwargs["latents"] * (BOX["pipe"].scheduler.step_index or 0)}
reports_to_a_list: STEPS.append(i)
writes_on_a_module: pipe.net.scale = 2.0
writes_on_weights: pipe.net.first.weight.data.zero_()
writes_on_the_class: type(pipe).last = t
sets_adapters: pipe.net.set_adapters(["a"])
loads_adapters: pipe.load_lora_weights("x")
""")


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


BROUGHT_CLEAN: dict[str, Any] = {
    **CLEAN, "closure over plain data": _reader({"scale": 2.0}),
    "partial": functools.partial(CLEAN["changes_latents"]),
    "decorated": _decorated(CLEAN["changes_latents"]), "method": Helper().callback,
    "method of an owner that has the pipeline and does not use it": Helper(PIPE).callback,
    "object": Calling(), "callback of diffusers": Cutoff(), "lambda": lambda pipe, i, t, kwargs: {},
    "builtin": dict, "None": None,
}  # fmt: skip
BROUGHT_PRIVATE: dict[str, Any] = {
    **PRIVATE, "closure over the pipeline": _closure(PIPE),
    "closure over its scheduler": _closure(PIPE.scheduler), "default": _default,
    "keyword default": _keyword, "partial with the pipeline": functools.partial(_first, PIPE),
    "decorated closure": _decorated(_closure(PIPE)),
    "decorated twice": _decorated(_decorated(PRIVATE["reports_to_a_list"])),
    "method of the pipeline": PIPE.step, "method of an owner that counts": Helper().counting,
    "method that reads the pipeline": Helper(PIPE).reading,
    "object that counts": CallingAndCounting(), "callback of diffusers that leaks": Leaking(),
    "callbacks of diffusers": MultiPipelineCallbacks([Cutoff(), Leaking()]),
    "lambda with the pipeline": lambda pipe, i, t, kwargs: PIPE,
}  # fmt: skip


@pytest.mark.parametrize("name", [*BROUGHT_CLEAN, *BROUGHT_PRIVATE])
def test_a_callback_is_private_where_it_reaches_past_its_arguments(name: str) -> None:
    callback = (BROUGHT_CLEAN | BROUGHT_PRIVATE)[name]

    judge(name in BROUGHT_PRIVATE, PIPE, callback_on_step_end=callback)


def test_what_a_callback_reaches_is_looked_at_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def callback(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        OTHER._interrupt = True
        return {}

    def harmless(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        return {"latents": kwargs["latents"] * (OTHER is None)}

    judge(False, PIPE, callback_on_step_end=harmless)
    monkeypatch.setitem(globals(), "OTHER", PIPE)
    judge(True, PIPE, callback_on_step_end=callback)
    judge(True, PIPE, callback_on_step_end=harmless)


def test_the_reasons_of_one_request_are_not_those_of_the_next() -> None:
    judge(True, PIPE, callback_on_step_end=_default)
    judge(False, PIPE, callback_on_step_end=CLEAN["changes_latents"])
    judge(False, PIPE, prompt="a cat", num_inference_steps=3)


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
    ("helper", "is_private"),
    [
        (Controller(), False),
        (Controller(values=[1, 2], names={"a": 1}), False),
        (Controller(pipe=PIPE), True),
        (Controller(parts=[{"pipe": PIPE}]), True),
        (Controller(lock=threading.Lock()), True),
        (Global(), True),
        ([Global()], True),
        ({"a": Global()}, True),
        (lambda net: net.weight.mul_(2), True),  # of two in a line the source is in doubt
        (lambda net: setattr(net, "gain", 3.0), True),
        (lambda x: x + 1, False),
        (Image.open(io.BytesIO(png())), False),  # not read yet
    ],
)
def test_objects_that_a_request_brings_are_walked(helper: Any, is_private: bool) -> None:
    judge(is_private, PIPE, helper=helper)
