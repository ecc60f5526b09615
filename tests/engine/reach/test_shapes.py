"""Shapes of code that people write around their state: seen through, or private in doubt."""

# ruff: noqa: F401 (texts use what is imported)

import functools
import linecache
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from carpool.engine.reach import private_reasons
from support.reach import Net, judge, stepping, written

STATE: dict[str, Any] = {"n": 0}
SEEN: list[Any] = []
COMPILED: Any = types.SimpleNamespace(__module__="mine.fast", __qualname__="fast")
PIPE = stepping()
WEAK = weakref.ref(PIPE)


@functools.singledispatch
def dispatched(x: Any) -> Any:
    return x


@dispatched.register
def _(x: torch.Tensor) -> Any:
    STATE["n"] += 1
    return x


class Descriptor:
    """Keeps what its owners get in a dictionary of its own."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self.values.get(id(instance))

    def __set__(self, instance: Any, value: Any) -> None:
        self.values[id(instance)] = value


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def up(self) -> int:
        self.n += 1
        return self.n


SLOTS = Slots()


class Meta(type):
    level = 0


class OfMeta(metaclass=Meta):
    pass


class Base:
    seen: ClassVar[list[Any]] = []

    def remember(self, x: Any) -> None:
        self.seen.append(x)

    def scale(self, x: Any) -> Any:
        return x * 2


class Derived(Base):
    def scale(self, x: Any) -> Any:
        return super().scale(x) + 1


class Remembering(Base):
    def scale(self, x: Any) -> Any:
        self.remember(x)
        return super().scale(x)


class Partial:
    def _add(self, n: int, x: Any) -> Any:
        STATE["n"] += n
        return x

    add = functools.partialmethod(_add, 1)


def memory(function: Any) -> Any:
    cache: dict[Any, Any] = {}

    @functools.wraps(function)
    def inner(x: Any) -> Any:
        if id(x) not in cache:
            cache[id(x)] = function(x)
        return cache[id(x)]

    return inner


@memory
def remembered(x: Any) -> Any:
    return x


def counter() -> Callable[[], int]:
    n = 0

    def up() -> int:
        nonlocal n
        n += 1
        return n

    return up


UP = counter()


def steps(x: Any) -> Iterator[Any]:
    for i in range(3):
        STATE["n"] = i
        yield x


steps_of = functools.partial(written, globals())

CLEAN = steps_of("""
by_a_class_that_overrides: return Derived().scale(x)
""")
PRIVATE = steps_of("""
by_single_dispatch: return dispatched(x)
by_a_partial_method: return Partial().add(x)
by_a_decorator_with_memory: return remembered(x)
by_a_closure_of_a_module: return x * UP()
in_a_generator: return sum(steps(x))
in_a_coroutine:
    async def later() -> None:
        SEEN.append(x)
    return later()
with_a_walrus:
    if (seen := SEEN) is not None:
        seen += [x]
in_a_dictionary_of_lambdas: return {"a": lambda: STATE.update(n=1)}["a"]()
in_a_match:
    match SEEN:
        case [_, *_]:
            SEEN.clear()
on_a_function: steps.n = 1
by_a_name_that_is_made: return getattr(self, "re" + "member")(x)
in_slots: return x * SLOTS.up()
on_a_metaclass: OfMeta.level = 3
in_a_class_above: return Remembering().scale(x)
by_a_weak_reference: pipe = WEAK(); return x * (pipe is not None)
by_operator: operator.setitem(STATE, "n", 1)
kept_on_itself: self.kept = SEEN; self.kept.append(x)
through_a_tuple: (seen, _), y = (SEEN, 1), x; seen.append(y)
in_a_default_of_a_lambda: return (lambda y, seen=SEEN: seen.append(y))(x)
in_a_finally:
    try:
        return self.net(x)
    finally:
        STATE["n"] += 1
in_a_class_of_the_function:
    class Inner:
        def put(self) -> None:
            SEEN.append(x)
    Inner().put()
""")


@pytest.mark.parametrize("name", [*CLEAN, *PRIVATE])
def test_shapes_of_steps(name: str) -> None:
    attributes: Any = {"remember": Base.remember, "seen": SEEN} if "made" in name else {}
    judge(name in PRIVATE, stepping((CLEAN | PRIVATE)[name], **attributes))


def test_a_descriptor_keeps_what_its_owners_set() -> None:
    def step(self: Any, x: Any, t: Any) -> Any:
        self.memory = x
        return x

    judge(True, stepping(step, memory=Descriptor()))


def test_a_setter_is_run_by_an_assignment() -> None:
    def setter(self: Any, value: Any) -> None:
        SEEN.append(value)

    def step(self: Any, x: Any, t: Any) -> Any:
        self.memory = x
        return x

    judge(True, stepping(step, memory=property(lambda self: 1, setter)))


def test_a_cached_property_of_a_net_is_kept_on_it() -> None:
    class Cached(Net):
        @functools.cached_property
        def scale(self) -> Any:
            STATE["n"] += 1
            return 2.0

        def forward(self, x: Any, t: Any = None) -> Any:
            return super().forward(x) * self.scale

    judge(True, stepping(net=Cached()))


def in_a_file(text: str, name: str) -> Any:
    """A function of text, as a notebook or the code of a model repository has it."""
    space: dict[str, Any] = {"__name__": "transformers_modules.mine.model", "nn": nn}
    if name.endswith(".py"):
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec"), space)
    return space["step"]


STEP = "def step(self, x, t):\n    return self.net(x, t)\n"
KEEPING = "STATE = {}\ndef step(self, x, t):\n    STATE['x'] = x\n    return x\n"


@pytest.mark.parametrize(
    ("text", "name", "is_private"),
    [
        (STEP, "/nowhere/modeling_mine.py", False),
        (KEEPING, "/nowhere/modeling_more.py", True),
        (STEP, "<stdin>", True),
        (STEP.replace("\n    ", " ").replace(":", ": "), "<string>", True),
    ],
)
def test_code_without_source_is_private(text: str, name: str, is_private: bool) -> None:
    judge(is_private, stepping(in_a_file(text, name)))


def test_compiled_code_is_private() -> None:
    judge(True, stepping(lambda self, x, t: COMPILED(x)))


def test_a_callback_may_fill_a_list_of_its_request() -> None:
    seen: list[Any] = []

    def logging(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        seen.append(i)
        return kwargs

    def reading(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        seen.append(i)
        return {"latents": kwargs["latents"] * len(seen)}

    judge(False, PIPE, callback_on_step_end=logging)
    judge(True, PIPE, callback_on_step_end=reading)


def test_a_callback_whose_owner_has_changed_is_walked_again() -> None:
    owner = types.SimpleNamespace(pipe=None)

    def callback(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        return {"latents": kwargs["latents"] * (owner.pipe is None)}

    judge(False, PIPE, callback_on_step_end=callback)
    owner.pipe = PIPE
    judge(True, PIPE, callback_on_step_end=callback)


def test_the_reasons_of_a_callback_are_looked_up_the_second_time() -> None:
    def callback(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        SEEN.append(i)
        return kwargs

    first = private_reasons(PIPE, {"callback_on_step_end": callback})

    assert first == private_reasons(PIPE, {"callback_on_step_end": callback})
    assert len(first) == 1
