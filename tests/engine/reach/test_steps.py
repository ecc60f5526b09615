"""Steps that people write in pipelines of their own: which keep a request from a shared ride."""

import asyncio
import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import heapq
import itertools
import json
import logging
import math
import multiprocessing
import operator
import os
import queue
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import random as drawn
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks import HookRegistry
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.reach import Cases, judge, stepping

cases = Cases()

COUNT = 0
SCALES: dict[str, Any] = {"a": 1.0, "b": [1.0, 2.0]}
SEEN: list[Any] = []
STATE: dict[str, Any] = {"n": 0}
RING: Any = collections.deque(maxlen=3)
COUNTS: Any = collections.defaultdict(int)
NUMBERS = itertools.count()
TABLE, ARRAY = torch.ones(4), np.ones(4)
SPACE = SimpleNamespace(n=0)
LOCK, LIMIT, EVENT = threading.Lock(), threading.Semaphore(2), threading.Event()
LINE: Any = queue.Queue()
LOCAL = threading.local()
STREAM = torch.Generator()
DEPTH: Any = contextvars.ContextVar("depth", default=1)
LOGGER = logging.getLogger("mine")
SCALE, NAMES = 0.5, ("a", "b")
NET = nn.Linear(4, 4)


class Counter:
    total: ClassVar[int] = 0
    log: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.n = 0

    def up(self) -> int:
        self.n += 1
        return self.n

    def up_all(self) -> None:
        type(self).total += 1

    def read(self) -> int:
        return self.n

    @property
    def next(self) -> int:
        self.n += 1
        return self.n

    def __enter__(self) -> "Counter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.n += 1


class Proxy:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    pass


COUNTER, PROXY = Counter(), Proxy(STATE)


@dataclasses.dataclass
class Point:
    x: float
    seen: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Options:
    scale: float = 1.0


OPTIONS = Options()


def times(x: Any, scale: float = 2.0) -> Any:
    return x * scale


def remember(x: Any, memory: list[Any] = []) -> Any:  # noqa: B006
    memory.append(x)
    return memory[-1]


def put(container: Any, x: Any) -> None:
    container["last"] = x


def put_through(container: Any, x: Any) -> None:
    put(container, x)


def pick() -> Any:
    return STATE


@functools.lru_cache
def table(size: int) -> Any:
    return torch.linspace(0, 1, size)


@functools.lru_cache
def counted(size: int) -> Any:
    SEEN.append(size)
    return size


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def counting(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        STATE["n"] += 1
        return function(*args, **kwargs)

    return inner


@decorated
def wrapped(x: Any) -> Any:
    return x * 2


@counting
def wrapped_and_counted(x: Any) -> Any:
    return x * 2


@torch.no_grad()
def under_torch(x: Any) -> Any:
    SEEN.append(x)
    return x


@contextlib.contextmanager
def timed() -> Any:
    yield 1


@contextlib.contextmanager
def switched() -> Any:
    STATE["on"] = True
    yield 1
    STATE["on"] = False


def recursive(n: int) -> int:
    return n if n < 1 else recursive(n - 1)


# clean: what it changes is the call's own


@cases.clean
def calls_the_net(self: Any, x: Any, t: Any) -> Any:
    return self.net(x, t)


@cases.clean
def keeps_state_on_itself(self: Any, x: Any, t: Any) -> Any:
    self.n = getattr(self, "n", 0) + 1
    self.kept = [x]
    self.kept.append(t)
    self.kept[0] = x
    self.by_name = {}
    self.by_name["x"] = x
    self.by_name.setdefault("y", []).append(t)
    return x


@cases.clean
def keeps_state_on_its_scheduler(self: Any, x: Any, t: Any) -> Any:
    self.scheduler.last = x
    self.scheduler.timesteps[0] = 1
    self.scheduler.set_timesteps(4)
    return x


@cases.clean
def sets_attributes_by_name(self: Any, x: Any, t: Any) -> Any:
    for name in NAMES:
        setattr(self, f"_{name}", t)
    vars(self)["more"] = x
    return x


@cases.clean
def local_containers(self: Any, x: Any, t: Any) -> Any:
    parts: list[Any] = []
    seen, by_name = set(), dict[Any, Any]()
    for i in range(3):
        parts.append(x * i)
        seen.add(i)
        by_name[i] = x
    by_name.update(a=1)
    parts[0] += 1
    parts[1:2] = [x]
    del by_name["a"]
    return torch.stack([*parts]).sum(0)


@cases.clean
def in_place_on_its_own(self: Any, x: Any, t: Any) -> Any:
    x = self.net(x)
    x += 1
    x[0] = 0
    x.mul_(2).clamp_(0, 1)
    y = x.view(-1)
    y.add_(1)
    torch.add(x, 1, out=y)
    return x


@cases.clean
def reads_globals(self: Any, x: Any, t: Any) -> Any:
    scale = SCALE * SCALES["b"][0] + STATE["n"] + STATE.get("m", 0)
    for name, value in SCALES.items():
        x = x * (value if name == "a" else 1)
    return x * scale + TABLE + TABLE[0] + torch.as_tensor(ARRAY).sum() + len(SEEN)


@cases.clean
def new_tensors_of_globals(self: Any, x: Any, t: Any) -> Any:
    y = TABLE.clone()
    y += 1
    z = (TABLE * 2).mul_(3)
    z[0] = 1
    copied = list(SEEN)
    copied.append(x)
    merged = {**STATE, "x": x}
    merged["y"] = t
    deep = copy.deepcopy(STATE)
    deep["n"] = 3
    return y + z


@cases.clean
def functions_of_its_own(self: Any, x: Any, t: Any) -> Any:
    return times(wrapped(x)) + table(4) + recursive(3)


@cases.private("in doubt: `__enter__` gives it away, and then any of its methods may run")
def helper_of_the_call(self: Any, x: Any, t: Any) -> Any:
    counter = Counter()
    counter.up()
    counter.n += 1
    point = Point(1.0)
    point.seen.append(2.0)
    point.x = 3.0
    with counter as same:
        same.n = 2
    return x * counter.read()


@cases.clean
def reads_a_helper(self: Any, x: Any, t: Any) -> Any:
    return x * COUNTER.read() * OPTIONS.scale + Counter.total


@cases.clean
def logs(self: Any, x: Any, t: Any) -> Any:
    LOGGER.info("step %s", t)
    print(t)
    logging.getLogger("other").warning("x")
    return x


@cases.clean
def closures_of_the_call(self: Any, x: Any, t: Any) -> Any:
    total, seen = 0, []

    def add(value: Any) -> Any:
        nonlocal total
        total += 1
        seen.append(value)
        return value

    return add(x) + sum(add(i) for i in range(2)) + sum(map(lambda v: v + total, [1]))  # noqa: C417


@cases.clean
def modes_of_torch(self: Any, x: Any, t: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        x = x.detach().requires_grad_()
        y = self.net(x, t).sum()
    (grad,) = torch.autograd.grad(y, x)
    return grad


@cases.clean
def global_random_numbers(self: Any, x: Any, t: Any) -> Any:
    random.shuffle([1, 2])
    return x + torch.randn(4) * random.random() + np.random.rand()


@cases.clean
def branches(self: Any, x: Any, t: Any) -> Any:
    y = x if t else None
    try:
        y = y or x
        if y is None:
            raise KeyError
    except ValueError as error:
        error.args = ()
        raise RuntimeError("no") from error
    finally:
        x = x + 1
    while x is None:
        x = y
        continue
    match t:
        case [a, *rest]:
            x = x + a + len(rest)
        case {"k": v, **more}:
            x = x + v + len(more)
        case Point(x=px):
            x = x + px
        case _:
            pass
    by_number = {i: 2 * j for i, j in enumerate((x, y))}
    return by_number[0] if x is not None and (z := y) and z else f"{x!r:>3}"


@cases.clean
def reads_files(self: Any, x: Any, t: Any) -> Any:
    with open(__file__) as file:
        file.read()
    Path(__file__).read_text()
    return x * len(os.environ.get("HOME", "")) + math.sqrt(4)


@cases.clean
def reads_modules(self: Any, x: Any, t: Any) -> Any:
    dtype = next(self.net.parameters()).dtype
    for layer in self.net.layers:
        x = layer(x)
    self.net.first.weight.sum()
    return F.silu(x.to(dtype)) + NET(x) + self.net.options["scale"]


@cases.clean
def passes_its_methods(self: Any, x: Any, t: Any) -> Any:
    return next(map(self.net, [x])) + functools.reduce(operator.add, [x, x])


@cases.clean
def inherits(self: Any, x: Any, t: Any) -> Any:
    with self.progress_bar(total=3) as bar:
        bar.update()
    self.check_inputs = None
    return super(type(self), self).step(x, t)


@cases.clean
def context_of_its_own(self: Any, x: Any, t: Any) -> Any:
    with timed() as scale:
        return x * scale


@cases.clean
def generators(self: Any, x: Any, t: Any) -> Any:
    def parts() -> Any:
        yield x
        yield from (t, x)

    iterator = iter(parts())
    return next(iterator), [*iterator]


# private: it changes what outlives the call


@cases.private("writes the global `COUNT`")
def counts_in_a_global(self: Any, x: Any, t: Any) -> Any:
    global COUNT
    COUNT += 1
    return x * COUNT


@cases.private("writes `STATE[...]`")
def counts_in_a_dictionary(self: Any, x: Any, t: Any) -> Any:
    STATE["n"] += 1
    return x


@cases.private("`SEEN.append`")
def appends_to_a_global(self: Any, x: Any, t: Any) -> Any:
    SEEN.append(x)
    return SEEN[-1]


@cases.private("`SEEN.append`")
def appends_through_a_variable(self: Any, x: Any, t: Any) -> Any:
    seen = SEEN
    if t:
        seen = []
    seen.append(x)
    return x


@cases.private("`SEEN.append`")
def appends_by_a_bound_method(self: Any, x: Any, t: Any) -> Any:
    append = SEEN.append
    append(x)
    return x


@cases.private("`RING.appendleft`")
def keeps_a_ring(self: Any, x: Any, t: Any) -> Any:
    RING.appendleft(x)
    return x


@cases.private("defaultdict")
def makes_entries_by_reading(self: Any, x: Any, t: Any) -> Any:
    return COUNTS[t]


@cases.private("takes from an iterator")
def numbers_its_steps(self: Any, x: Any, t: Any) -> Any:
    return x * next(NUMBERS)


@cases.private("changes `TABLE` in place")
def adds_to_a_table(self: Any, x: Any, t: Any) -> Any:
    table = TABLE
    table += 1
    return x + table


@cases.private("mul_")
def writes_a_view(self: Any, x: Any, t: Any) -> Any:
    TABLE.view(-1).mul_(2)
    return x


@cases.private("writes `TABLE[...]")
def writes_an_entry(self: Any, x: Any, t: Any) -> Any:
    TABLE[0] = 1
    return x


@cases.private("copy_")
def copies_into_a_table(self: Any, x: Any, t: Any) -> Any:
    TABLE.copy_(x)
    return x


@cases.private("`ARRAY.fill`")
def fills_an_array(self: Any, x: Any, t: Any) -> Any:
    ARRAY.fill(2)
    return x


@cases.private("writes the answer of `torch.add`")
def adds_into_a_table(self: Any, x: Any, t: Any) -> Any:
    return torch.add(x, 1, out=TABLE)


@cases.private("`heapq.heappush`")
def pushes_on_a_heap(self: Any, x: Any, t: Any) -> Any:
    heapq.heappush(SEEN, t)
    return x


@cases.private("`list.append`")
def appends_by_the_method_of_a_class(self: Any, x: Any, t: Any) -> Any:
    list.append(SEEN, x)
    torch.Tensor.add_([x][0], 1)
    return x


@cases.private("`torch.Tensor.add_`")
def adds_by_the_method_of_a_class(self: Any, x: Any, t: Any) -> Any:
    return torch.Tensor.add_(TABLE, 1)


@cases.private("`object.__setattr__`")
def sets_by_the_method_of_a_class(self: Any, x: Any, t: Any) -> Any:
    object.__setattr__(SPACE, "n", 3)
    return x


@cases.clean
def asks_for_a_module(self: Any, x: Any, t: Any) -> Any:
    return x * ("xformers" in sys.modules)


@cases.private("check_if_exists_or_initialize")
def adds_a_hook_of_diffusers(self: Any, x: Any, t: Any) -> Any:
    HookRegistry.check_if_exists_or_initialize(self.net).register_hook(None, "mine")
    return x


@cases.private("reaches the module")
def writes_a_python_module(self: Any, x: Any, t: Any) -> Any:
    sys.modules[__name__].COUNT = 3  # type: ignore[attr-defined]
    return x


@cases.private("on the module Net")
def writes_by_the_attributes_of_its_net(self: Any, x: Any, t: Any) -> Any:
    self.net.__dict__["scale"] = 2.0
    return x


@cases.private("on the module Net")
def writes_on_a_component(self: Any, x: Any, t: Any) -> Any:
    self.components["net"].scale = 2.0
    return x


@cases.private("in place")
def adds_to_a_weight(self: Any, x: Any, t: Any) -> Any:
    weight = self.net.first.weight
    weight += 1
    return x


@cases.clean
def context_variables(self: Any, x: Any, t: Any) -> Any:
    DEPTH.set(3)
    return x * DEPTH.get()


@cases.clean
def copies(self: Any, x: Any, t: Any) -> Any:
    other = copy.copy(self.net)
    other.scale = 2.0
    mine = copy.deepcopy(self.net)
    mine.first.weight.data.mul_(2)
    return mine(x)


@cases.private("writes `SPACE.n`")
def writes_a_namespace(self: Any, x: Any, t: Any) -> Any:
    SPACE.n += 1
    return x


@cases.private("`setattr`")
def sets_an_attribute(self: Any, x: Any, t: Any) -> Any:
    setattr(SPACE, "n", 2)  # noqa: B010
    return x


@cases.private("...()[...]`")
def writes_attributes_by_vars(self: Any, x: Any, t: Any) -> Any:
    vars(SPACE)["n"] = 3
    return x


@cases.private("`globals`")
def writes_globals_by_name(self: Any, x: Any, t: Any) -> Any:
    globals()["COUNT"] = 3
    return x


@cases.private("`exec`")
def runs_text(self: Any, x: Any, t: Any) -> Any:
    exec("global COUNT; COUNT = 3")
    return x


@cases.private("Counter.up` writes `self.n`")
def counts_in_a_helper(self: Any, x: Any, t: Any) -> Any:
    return x * COUNTER.up()


@cases.private("Counter.next` writes `self.n`")
def counts_in_a_property(self: Any, x: Any, t: Any) -> Any:
    return x * COUNTER.next


@cases.private("Counter.__exit__` writes `self.n`")
def counts_at_the_end_of_a_block(self: Any, x: Any, t: Any) -> Any:
    with COUNTER:
        return x


@cases.private("on the class Counter")
def counts_on_a_class(self: Any, x: Any, t: Any) -> Any:
    Counter.total += 1
    return x


@cases.private("on the class Counter")
def counts_on_the_class_of_its_helper(self: Any, x: Any, t: Any) -> Any:
    Counter().up_all()
    return x


@cases.private("`Counter.log.append`")
def appends_to_a_list_of_a_class(self: Any, x: Any, t: Any) -> Any:
    Counter.log.append(1)
    return x


@cases.private("log.append")
def appends_to_a_list_of_the_class_of_its_helper(self: Any, x: Any, t: Any) -> Any:
    counter = Counter()
    counter.log.append(1)
    return x


@cases.private("on the class Mine")
def counts_on_its_own_class(self: Any, x: Any, t: Any) -> Any:
    type(self).count = 1
    return x


@cases.private("on the class Mine")
def counts_on_its_own_class_by_another_name(self: Any, x: Any, t: Any) -> Any:
    self.__class__.count = 1
    return x


@cases.private("`remember` calls `memory.append`")
def remembers_in_a_default(self: Any, x: Any, t: Any) -> Any:
    return remember(x)


@cases.private("`put` writes `container[...]`")
def hands_a_global_over(self: Any, x: Any, t: Any) -> Any:
    put_through(STATE, x)
    put({}, x)
    return x


@cases.private("[...]`")
def writes_what_a_function_gives(self: Any, x: Any, t: Any) -> Any:
    pick()["n"] = 1
    return x


@cases.private("`counted` calls `SEEN.append`")
def cached_with_a_side(self: Any, x: Any, t: Any) -> Any:
    return counted(3)


@cases.private("writes `STATE[...]`")
def decorated_with_a_side(self: Any, x: Any, t: Any) -> Any:
    return wrapped_and_counted(x)


@cases.private("`SEEN.append`")
def decorated_by_torch(self: Any, x: Any, t: Any) -> Any:
    return under_torch(x)


@cases.private("writes `STATE[...]`")
def switches_in_a_context(self: Any, x: Any, t: Any) -> Any:
    with switched():
        return x


@cases.private("`SEEN.append`")
def appends_in_a_function_for_a_library(self: Any, x: Any, t: Any) -> Any:
    return list(map(lambda v: SEEN.append(v), [x]))  # noqa: C417


@cases.private("`SEEN.append`")
def appends_in_a_comprehension(self: Any, x: Any, t: Any) -> Any:
    return [SEEN.append(i) for i in range(3)]  # type: ignore[func-returns-value]


@cases.private("`STATE.pop`")
def empties_a_dictionary(self: Any, x: Any, t: Any) -> Any:
    return STATE.pop("last", x)


@cases.private("writes `STATE[...]`")
def deletes_an_entry(self: Any, x: Any, t: Any) -> Any:
    del STATE["last"]
    return x


@cases.private("writes `os.environ[...]`")
def writes_the_environment(self: Any, x: Any, t: Any) -> Any:
    os.environ["MINE"] = str(t)
    return x


@cases.private("`os.putenv`")
def puts_into_the_environment(self: Any, x: Any, t: Any) -> Any:
    os.putenv("MINE", "1")
    return x


@cases.private("opens a file for writing")
def writes_a_file(self: Any, x: Any, t: Any) -> Any:
    with open("/tmp/mine", "w") as file:
        json.dump(1, file)
    return x


@cases.private("write_text")
def writes_a_path(self: Any, x: Any, t: Any) -> Any:
    Path("/tmp/mine").write_text("1")
    return x


@cases.private("which blocks")
def holds_a_lock(self: Any, x: Any, t: Any) -> Any:
    with LOCK:
        return self.net(x, t)


@cases.private("which blocks")
def holds_a_semaphore(self: Any, x: Any, t: Any) -> Any:
    LIMIT.acquire()
    try:
        return self.net(x, t)
    finally:
        LIMIT.release()


@cases.private("which blocks")
def waits_for_an_event(self: Any, x: Any, t: Any) -> Any:
    EVENT.wait()
    return x


@cases.private("which blocks")
def puts_into_a_queue(self: Any, x: Any, t: Any) -> Any:
    LINE.put(x)
    return LINE.get()


@cases.private("which blocks")
def keeps_state_of_threads(self: Any, x: Any, t: Any) -> Any:
    LOCAL.n = 1
    return x


@cases.private("`asyncio`")
def runs_an_event_loop(self: Any, x: Any, t: Any) -> Any:
    async def call() -> Any:
        return self.net(x, t)

    return asyncio.run(call())


@cases.private("ThreadPoolExecutor")
def runs_threads(self: Any, x: Any, t: Any) -> Any:
    with ThreadPoolExecutor() as pool:
        return pool.submit(self.net, x).result()


@cases.private("`multiprocessing`")
def asks_for_processes(self: Any, x: Any, t: Any) -> Any:
    return multiprocessing.cpu_count()


@cases.private("`threading`")
def imports_threads(self: Any, x: Any, t: Any) -> Any:
    import threading as threads

    threads.Thread(target=print).start()
    return x


@cases.clean
def draws_by_a_name_of_its_own(self: Any, x: Any, t: Any) -> Any:
    return x * drawn()


@cases.private("a stream of random numbers")
def draws_from_a_stream_of_its_own(self: Any, x: Any, t: Any) -> Any:
    return torch.randn(4, generator=STREAM)


@cases.private("functional_call")
def swaps_weights(self: Any, x: Any, t: Any) -> Any:
    weights = {name: 2 * one for name, one in self.net.named_parameters()}
    return torch.func.functional_call(self.net, weights, (x,))


@cases.private("set_attn_processor")
def sets_processors(self: Any, x: Any, t: Any) -> Any:
    self.unet.set_attn_processor(None)
    return x


@cases.private("register_forward_hook")
def adds_a_hook(self: Any, x: Any, t: Any) -> Any:
    handle = self.net.register_forward_hook(lambda *_: None)
    x = self.net(x)
    handle.remove()
    return x


@cases.clean  # it is noticed while it runs
def sets_the_default_type(self: Any, x: Any, t: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    return x


@cases.private("in doubt: its class has a metaclass")
def chooses_a_kernel(self: Any, x: Any, t: Any) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return self.net(x)


@cases.private("torch.backends")
def switches_a_backend(self: Any, x: Any, t: Any) -> Any:
    torch.backends.cudnn.benchmark = True
    return x


@cases.clean  # it is noticed while it runs
def sees_operations(self: Any, x: Any, t: Any) -> Any:
    with Mode():  # type: ignore[no-untyped-call]
        return self.net(x)


@cases.private("on the module Net")
def writes_on_its_net(self: Any, x: Any, t: Any) -> Any:
    self.net.scale = 2.0
    return self.net(x)


@cases.private("self.net.options[...]`")
def writes_on_options_of_its_net(self: Any, x: Any, t: Any) -> Any:
    self.net.options["scale"] = 2.0
    return self.net(x)


@cases.private("mul_")
def scales_weights(self: Any, x: Any, t: Any) -> Any:
    self.net.first.weight.data.mul_(2)
    return self.net(x)


@cases.private("mul_")
def scales_all_weights(self: Any, x: Any, t: Any) -> Any:
    for weight in self.net.parameters():
        weight.data.mul_(2)
    return self.net(x)


@cases.private("load_state_dict")
def loads_weights(self: Any, x: Any, t: Any) -> Any:
    self.net.load_state_dict({})
    return self.net(x)


@cases.private("self.net.first.forward`")
def replaces_a_forward(self: Any, x: Any, t: Any) -> Any:
    self.net.first.forward = lambda x: x
    return self.net(x)


@cases.private("PROXY.update")
def writes_through_a_proxy(self: Any, x: Any, t: Any) -> Any:
    PROXY.update(x=1)
    return x


@pytest.mark.parametrize(
    ("step", "reason"), cases.all, ids=lambda one: getattr(one, "__name__", "")
)
def test_a_step_is_private_where_it_changes_what_outlives_the_call(step: Any, reason: str) -> None:
    judge(reason, stepping(step))
