"""Whatever objects a walk meets, it gives reasons and raises nothing."""

import sys
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.reach import private_reasons
from support.reach import stepping


class Raising:
    """Every attribute of its objects raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class RaisingSlowly:
    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)

    @property
    def pipe(self) -> Any:
        raise KeyError("pipe")

    def __eq__(self, other: object) -> bool:
        raise TypeError

    def __hash__(self) -> int:
        raise TypeError

    def __bool__(self) -> bool:
        raise TypeError

    def __len__(self) -> int:
        raise TypeError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError


class Slotted:
    __slots__ = ("empty", "full")

    def __init__(self) -> None:
        self.full = self


class Endless:
    def __getattr__(self, name: str) -> Any:
        return Endless()

    def __iter__(self) -> Any:
        while True:
            yield self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self(self(*args))


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)
        raise RuntimeError(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class OfMeta(metaclass=Meta):
    def __call__(self, *args: Any) -> Any:
        return OfMeta()


class Lying:
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("no class")

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no attributes")


class ListOfItself(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("not to be asked")

    def __call__(self) -> Any:
        return self[0]()


def deep(n: int) -> Any:
    value: Any = []
    for _ in range(n):
        value = [value]
    return value


def cycle() -> Any:
    value: dict[str, Any] = {}
    value["self"] = [value]
    return value


def nested_function(depth: int) -> Any:
    text = "lambda: " * depth + "None"
    return eval(text, {})


def calls_itself(*args: Any) -> Any:
    return calls_itself(calls_itself, *args)


def calls_the_other(x: Any) -> Any:
    return calls_back(lambda y: calls_the_other(x)(y))


def calls_back(x: Any) -> Any:
    return calls_the_other(x)


def without_a_name() -> Any:
    return types.FunctionType(calls_itself.__code__, {})


def large() -> Any:
    lines = "\n".join(f"    x = f(x[{i}]) if x else x.a{i}" for i in range(3000))
    scope: dict[str, Any] = {}
    exec(f"def f(x):\n{lines}\n    return x", scope)
    return scope["f"]


DEEP = deep(10)
ODD = [
    Raising(), RaisingSlowly(), Slotted(), Endless(), OfMeta(), OfMeta, Lying(), ListOfItself([1]),
    deep(5000), cycle(), nested_function(50), calls_itself, calls_the_other, without_a_name(),
    large(), types.SimpleNamespace(a=1), weakref.ref(calls_itself), weakref.proxy(calls_itself),
    (x for x in "a"), iter([1]), memoryview(b"a"), object(), type, property(calls_back), super,
    staticmethod(calls_back), sys, threading.Lock(), torch.ones(2), torch.nn.ReLU(), Ellipsis,
    NotImplemented, types.MethodType(calls_itself, 3), lambda *, a=DEEP, **k: k[a], print, len,
    types.MappingProxyType({"a": 1}), sys._getframe(), calls_itself.__code__, 10**100, float("nan"),
]  # fmt: skip


def test_a_function_may_have_defaults_of_parameters_that_it_lacks() -> None:
    def stale(x: Any) -> Any:
        return x

    stale.__kwdefaults__ = {"force": True}

    assert private_reasons(stepping(), {"callback_on_step_end": stale}) == []


@pytest.mark.parametrize("index", range(len(ODD)))
def test_nothing_is_raised_whatever_a_request_brings_or_a_pipeline_is_or_holds(index: int) -> None:
    pipe = stepping(lambda self, x, t: self.odd(x).a[0].b(self.odd))
    vars(pipe)["odd"] = ODD[index]
    net = stepping()
    vars(net.net)["odd"] = ODD[index]

    for one in (pipe, net, ODD[index]):
        assert isinstance(private_reasons(one), list)
    for name in ("helper", "callback_on_step_end"):
        assert isinstance(private_reasons(stepping(), {name: ODD[index]}), list)


@given(st.lists(st.sampled_from(range(len(ODD))), max_size=4), st.booleans())
def test_nothing_is_raised_whatever_a_callback_holds(chosen: list[int], is_called: bool) -> None:
    held = [ODD[i] for i in chosen]
    pipe = stepping()

    def callback(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        for one in held:
            kwargs[one] = one(i) if is_called else one.a.b[0]
        return {**kwargs, "x": held[-1]}

    assert isinstance(private_reasons(pipe, {"callback_on_step_end": callback}), list)


def test_a_tensor_that_comes_again_gives_no_reason() -> None:
    again = torch.ones(2)

    for _ in range(2):
        assert private_reasons(stepping(), {"prompt_embeds": again}) == []
