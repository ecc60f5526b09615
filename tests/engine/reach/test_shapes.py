"""Shapes of code that people write around their state: seen through, or private in doubt."""

import collections
import contextlib
import dataclasses
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
from support.reach import Cases, Net, judge, stepping

cases = Cases()
STATE: dict[str, Any] = {"n": 0}
SEEN: list[Any] = []
SIZES = {"small": (1, 2), "large": [3, 4]}
TABLE = torch.ones(4)
COMPILED: Any = types.SimpleNamespace(__module__="mine.fast", __qualname__="fast")
PIPE = stepping()
WEAK = weakref.ref(PIPE)
VIEW = types.MappingProxyType(STATE)
APPEND = SEEN.append


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


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    names: tuple[str, ...] = ("a", "b")


SETTINGS, SLOTS = Settings(), Slots()
DEQUE: Any = collections.deque(maxlen=2)


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


def logged(level: str) -> Any:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if level else None

        return inner

    return decorate


@logged("info")  # type: ignore[untyped-decorator]
@torch.no_grad()
def decorated(x: Any) -> Any:
    return x * 2


@logged("info")  # type: ignore[untyped-decorator]
@torch.inference_mode()
def decorated_with_state(x: Any) -> Any:
    SEEN.append(x)
    return x


@contextlib.contextmanager
def scope() -> Iterator[Any]:
    yield SIZES["small"]


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


@cases.private("the registered function writes")
def by_single_dispatch(self: Any, x: Any, t: Any) -> Any:
    return dispatched(x)


@cases.private("a partial method writes")
def by_a_partial_method(self: Any, x: Any, t: Any) -> Any:
    return Partial().add(x)


@cases.private("a cell of the decorator is written")
def by_a_decorator_with_memory(self: Any, x: Any, t: Any) -> Any:
    return remembered(x)


@cases.clean
def by_decorators_without_state(self: Any, x: Any, t: Any) -> Any:
    return decorated(x)


@cases.private("below two decorators")
def below_decorators(self: Any, x: Any, t: Any) -> Any:
    return decorated_with_state(x)


@cases.private("a closure counts")
def by_a_closure_of_a_module(self: Any, x: Any, t: Any) -> Any:
    return x * UP()


@cases.private("a generator function writes")
def in_a_generator(self: Any, x: Any, t: Any) -> Any:
    return sum(steps(x))


@cases.private("awaited code writes")
def in_a_coroutine(self: Any, x: Any, t: Any) -> Any:
    async def later() -> None:
        SEEN.append(x)

    return later()


@cases.private("a walrus writes nothing, the list does")
def with_a_walrus(self: Any, x: Any, t: Any) -> Any:
    if (seen := SEEN) is not None:
        seen += [x]
    return x


@cases.private("a comprehension pops")
def in_a_nested_comprehension(self: Any, x: Any, t: Any) -> Any:
    return [y for part in [SEEN] for y in [part.pop()]]


@cases.private("in a lambda, in a dictionary")
def in_a_dictionary_of_lambdas(self: Any, x: Any, t: Any) -> Any:
    return {"a": lambda: STATE.update(n=1)}["a"]()


@cases.private("a subject is matched, and written")
def in_a_match(self: Any, x: Any, t: Any) -> Any:
    match SEEN:
        case [_, *_]:
            SEEN.clear()
    return x


@cases.private("the module's own dictionary")
def by_globals(self: Any, x: Any, t: Any) -> Any:
    space = globals()
    space["STATE"] = x
    return x


@cases.private("by the attributes of a function")
def on_a_function(self: Any, x: Any, t: Any) -> Any:
    steps.n = 1  # type: ignore[attr-defined]
    return x


@cases.private("by a name that is made")
def by_a_name_that_is_made(self: Any, x: Any, t: Any) -> Any:
    return getattr(self, "re" + "member")(x)


@cases.private("code that is typed in")
def in_text(self: Any, x: Any, t: Any) -> Any:
    return eval("STATE.update(n=1)")


@cases.private("slots of a shared object")
def in_slots(self: Any, x: Any, t: Any) -> Any:
    return x * SLOTS.up()


@cases.private("a metaclass")
def on_a_metaclass(self: Any, x: Any, t: Any) -> Any:
    OfMeta.level = 3
    return x


@cases.private("a class above appends")
def in_a_class_above(self: Any, x: Any, t: Any) -> Any:
    return Remembering().scale(x)


@cases.clean
def by_a_class_that_overrides(self: Any, x: Any, t: Any) -> Any:
    return Derived().scale(x)


@cases.private("the pipeline by a weak reference")
def by_a_weak_reference(self: Any, x: Any, t: Any) -> Any:
    pipe = WEAK()
    return x * (pipe is not None)


@cases.private("a bound method of a list")
def by_a_bound_method(self: Any, x: Any, t: Any) -> Any:
    APPEND(x)
    return x


@cases.private("a deque without a method")
def in_a_deque(self: Any, x: Any, t: Any) -> Any:
    DEQUE[-1] = x
    return x


@cases.private("a function of `operator`")
def by_operator(self: Any, x: Any, t: Any) -> Any:
    operator.setitem(STATE, "n", 1)
    return x


@cases.private("an own attribute is the shared list")
def kept_on_itself(self: Any, x: Any, t: Any) -> Any:
    self.kept = SEEN
    self.kept.append(x)
    return x


@cases.private("in a tuple, out of a tuple")
def through_a_tuple(self: Any, x: Any, t: Any) -> Any:
    (seen, _), y = (SEEN, 1), x
    seen.append(y)
    return x


@cases.private("a default of a lambda")
def in_a_default_of_a_lambda(self: Any, x: Any, t: Any) -> Any:
    return (lambda y, seen=SEEN: seen.append(y))(x)


@cases.private("in a `finally`")
def in_a_finally(self: Any, x: Any, t: Any) -> Any:
    try:
        return self.net(x)
    finally:
        STATE["n"] += 1


@cases.private("in a class of the function")
def in_a_class_of_the_function(self: Any, x: Any, t: Any) -> Any:
    class Inner:
        def put(self) -> None:
            SEEN.append(x)

    Inner().put()
    return x


@cases.clean
def reads_settings(self: Any, x: Any, t: Any) -> Any:
    scale = SETTINGS.scale * len(SETTINGS.names)
    small, large = SIZES["small"], SIZES.get("large")
    with scope() as sizes:
        return x * scale * small[0] * large[0] * sizes[1] * VIEW["n"]  # type: ignore[index]


@cases.clean
def changes_copies(self: Any, x: Any, t: Any) -> Any:
    sizes = [*SEEN, x]
    sizes.append(t)
    options = dict(STATE, more=1)
    options["n"] += 1
    merged = {**STATE, "m": 1} | STATE
    merged["n"] = 2
    table = TABLE.clone().mul_(2)
    table[0] = 1
    return x * table


@cases.clean
def keeps_to_itself(self: Any, x: Any, t: Any) -> Any:
    self.history = [*getattr(self, "history", ()), x]
    self.settings = Settings(2.0)
    self.settings.scale += 1
    self.cache = collections.defaultdict(list)
    self.cache[int(t)].append(x)
    return x


@pytest.mark.parametrize(
    ("step", "reason"), cases.all, ids=lambda one: getattr(one, "__name__", "")
)
def test_shapes_of_steps(step: Any, reason: str) -> None:
    attributes: Any = {"remember": Base.remember, "seen": SEEN} if "made" in step.__name__ else {}
    judge(reason, stepping(step, **attributes))


def test_a_descriptor_keeps_what_its_owners_set() -> None:
    def step(self: Any, x: Any, t: Any) -> Any:
        self.memory = x
        return x

    judge("in the descriptor", stepping(step, memory=Descriptor()))


def test_a_setter_is_run_by_an_assignment() -> None:
    def setter(self: Any, value: Any) -> None:
        SEEN.append(value)

    def step(self: Any, x: Any, t: Any) -> Any:
        self.memory = x
        return x

    judge("the setter appends", stepping(step, memory=property(lambda self: 1, setter)))


def test_a_cached_property_of_a_net_is_kept_on_it() -> None:
    class Cached(Net):
        @functools.cached_property
        def scale(self) -> Any:
            STATE["n"] += 1
            return 2.0

        def forward(self, x: Any, t: Any = None) -> Any:
            return super().forward(x) * self.scale

    judge("the cached property writes", stepping(net=Cached()))


def in_a_file(text: str, name: str) -> Any:
    """A function of text, as a notebook or the code of a model repository has it."""
    space: dict[str, Any] = {"__name__": "transformers_modules.mine.model", "nn": nn}
    if name.endswith(".py"):
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec"), space)
    return space["step"]


CLEAN = "def step(self, x, t):\n    return self.net(x, t)\n"
KEEPING = "STATE = {}\ndef step(self, x, t):\n    STATE['x'] = x\n    return x\n"


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        (CLEAN, "/nowhere/modeling_mine.py", ""),
        (KEEPING, "/nowhere/modeling_more.py", "written"),
        (CLEAN, "<stdin>", "no source"),
        (CLEAN.replace("\n    ", " ").replace(":", ": "), "<string>", "no source"),
    ],
)
def test_code_without_source_is_private(text: str, name: str, reason: str) -> None:
    judge(reason, stepping(in_a_file(text, name)))


def test_compiled_code_is_private() -> None:
    judge("compiled", stepping(lambda self, x, t: COMPILED(x)))


def test_a_callback_may_fill_a_list_of_its_request() -> None:
    seen: list[Any] = []

    def logging(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        seen.append(i)
        return kwargs

    def reading(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        seen.append(i)
        return {"latents": kwargs["latents"] * len(seen)}

    judge("", PIPE, callback_on_step_end=logging)
    judge("it reads the list", PIPE, callback_on_step_end=reading)


def test_a_callback_whose_owner_has_changed_is_walked_again() -> None:
    owner = types.SimpleNamespace(pipe=None)

    def callback(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        return {"latents": kwargs["latents"] * (owner.pipe is None)}

    judge("", PIPE, callback_on_step_end=callback)
    owner.pipe = PIPE
    judge("the pipeline", PIPE, callback_on_step_end=callback)


def test_the_reasons_of_a_callback_are_looked_up_the_second_time() -> None:
    def callback(pipe: Any, i: int, t: Any, kwargs: Any) -> Any:
        SEEN.append(i)
        return kwargs

    first = private_reasons(PIPE, {"callback_on_step_end": callback})

    assert first == private_reasons(PIPE, {"callback_on_step_end": callback})
    assert len(first) == 1
