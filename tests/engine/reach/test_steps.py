"""Steps that people write in pipelines of their own: which keep a request from a shared ride."""

# ruff: noqa: F401 (texts use what is imported)

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
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks import HookRegistry
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.reach import judge, stepping, written

COUNT = 0
SCALES: dict[str, Any] = {"a": 1.0, "b": [1.0, 2.0]}
SEEN: list[Any] = []
STATE: dict[str, Any] = {"n": 0}
RING: Any = collections.deque(maxlen=3)
COUNTS: Any = collections.defaultdict(int)
NUMBERS = itertools.count()
TABLE, ARRAY = torch.ones(4), np.ones(4)
SPACE, VIEW = SimpleNamespace(n=0), MappingProxyType(STATE)
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
@torch.no_grad()
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


steps_of = functools.partial(written, globals())

CLEAN = steps_of("""
calls_the_net: return self.net(x, t)
keeps_state_on_itself:
    self.n = getattr(self, "n", 0) + 1
    self.kept = [x]
    self.kept.append(t)
    self.kept[0] = x
    self.by_name = {}
    self.by_name["x"] = x
    self.by_name.setdefault("y", []).append(t)
    self.history = [*getattr(self, "history", ()), x]
    self.cache = collections.defaultdict(list)
    self.cache[int(t)].append(x)
keeps_state_on_its_scheduler:
    self.scheduler.last = x
    self.scheduler.timesteps[0] = 1
    self.scheduler.set_timesteps(4)
sets_attributes_by_name:
    for name in NAMES:
        setattr(self, f"_{name}", t)
    vars(self)["more"] = x
local_containers:
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
in_place_on_its_own:
    x = self.net(x)
    x += 1
    x[0] = 0
    x.mul_(2).clamp_(0, 1)
    y = x.view(-1)
    y.add_(1)
    torch.add(x, 1, out=y)
reads_globals:
    scale = SCALE * SCALES["b"][0] + STATE["n"] + STATE.get("m", 0)
    for name, value in SCALES.items():
        x = x * (value if name == "a" else 1)
    return x * scale + VIEW["n"] + TABLE + TABLE[0] + torch.as_tensor(ARRAY).sum() + len(SEEN)
new_tensors_of_globals:
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
    options = dict(STATE, more=1) | STATE
    options["n"] += 1
    return y + z
functions_of_its_own: return times(wrapped(x)) + table(4) + recursive(3)
reads_a_helper: return x * COUNTER.read() * OPTIONS.scale + Counter.total
logs: LOGGER.info("step %s", t); print(t); logging.getLogger("other").warning("x")
closures_of_the_call:
    total, seen = 0, []
    def add(value: Any) -> Any:
        nonlocal total
        total += 1
        seen.append(value)
        return value
    return add(x) + sum(add(i) for i in range(2)) + sum(map(lambda v: v + total, [1]))
modes_of_torch:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        x = x.detach().requires_grad_()
        y = self.net(x, t).sum()
    (grad,) = torch.autograd.grad(y, x)
    return grad
global_random_numbers:
    random.shuffle([1, 2])
    return x + torch.randn(4) * random.random() + np.random.rand()
branches:
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
reads_files:
    with open(__file__) as file:
        file.read()
    Path(__file__).read_text()
    return x * len(os.environ.get("HOME", "")) + math.sqrt(4)
reads_modules:
    dtype = next(self.net.parameters()).dtype
    for layer in self.net.layers:
        x = layer(x)
    self.net.first.weight.sum()
    return F.silu(x.to(dtype)) + NET(x) + self.net.options["scale"]
passes_its_methods: return next(map(self.net, [x])) + functools.reduce(operator.add, [x, x])
inherits:
    with self.progress_bar(total=3) as bar:
        bar.update()
    self.check_inputs = None
    return super(type(self), self).step(x, t)
context_of_its_own:
    with timed() as scale:
        return x * scale
generators:
    def parts() -> Any:
        yield x
        yield from (t, x)
    iterator = iter(parts())
    return next(iterator), [*iterator]
asks_for_a_module: return x * ("xformers" in sys.modules)
context_variables: DEPTH.set(3); return x * DEPTH.get()
copies:
    other = copy.copy(self.net)
    other.scale = 2.0
    mine = copy.deepcopy(self.net)
    mine.first.weight.data.mul_(2)
    return mine(x)
draws_by_a_name_of_its_own: return x * drawn()
sets_the_default_type: torch.set_default_dtype(torch.float64)
sees_operations:
    with Mode():
        return self.net(x)
""")
PRIVATE = steps_of("""
helper_of_the_call:
    counter = Counter()
    counter.up()
    counter.n += 1
    point = Point(1.0)
    point.seen.append(2.0)
    point.x = 3.0
    with counter as same:
        same.n = 2
    return x * counter.read()
counts_in_a_global: global COUNT; COUNT += 1; return x * COUNT
counts_in_a_dictionary: STATE["n"] += 1
appends_to_a_global: SEEN.append(x); return SEEN[-1]
appends_through_a_variable:
    seen = SEEN
    if t:
        seen = []
    seen.append(x)
appends_by_a_bound_method: append = SEEN.append; append(x)
keeps_a_ring: RING.appendleft(x)
makes_entries_by_reading: return COUNTS[t]
numbers_its_steps: return x * next(NUMBERS)
adds_to_a_table: table = TABLE; table += 1; return x + table
writes_a_view: TABLE.view(-1).mul_(2)
writes_an_entry: TABLE[0] = 1
copies_into_a_table: TABLE.copy_(x)
fills_an_array: ARRAY.fill(2)
adds_into_a_table: return torch.add(x, 1, out=TABLE)
pushes_on_a_heap: heapq.heappush(SEEN, t)
appends_by_the_method_of_a_class: list.append(SEEN, x); torch.Tensor.add_([x][0], 1)
adds_by_the_method_of_a_class: return torch.Tensor.add_(TABLE, 1)
sets_by_the_method_of_a_class: object.__setattr__(SPACE, "n", 3)
adds_a_hook_of_diffusers:
    registry = HookRegistry.check_if_exists_or_initialize(self.net)
    registry.register_hook(None, "mine")
writes_a_python_module: sys.modules[__name__].COUNT = 3
writes_by_the_attributes_of_its_net: self.net.__dict__["scale"] = 2.0
writes_on_a_component: self.components["net"].scale = 2.0
adds_to_a_weight: weight = self.net.first.weight; weight += 1
writes_a_namespace: SPACE.n += 1
sets_an_attribute: setattr(SPACE, "n", 2)
writes_attributes_by_vars: vars(SPACE)["n"] = 3
writes_globals_by_name: globals()["COUNT"] = 3
runs_text: exec("global COUNT; COUNT = 3")
counts_in_a_helper: return x * COUNTER.up()
counts_in_a_property: return x * COUNTER.next
counts_at_the_end_of_a_block:
    with COUNTER:
        return x
counts_on_a_class: Counter.total += 1
counts_on_the_class_of_its_helper: Counter().up_all()
appends_to_a_list_of_a_class: Counter.log.append(1)
appends_to_a_list_of_the_class_of_its_helper: counter = Counter(); counter.log.append(1)
counts_on_its_own_class: type(self).count = 1
counts_on_its_own_class_by_another_name: self.__class__.count = 1
remembers_in_a_default: return remember(x)
hands_a_global_over: put_through(STATE, x); put({}, x)
writes_what_a_function_gives: pick()["n"] = 1
cached_with_a_side: return counted(3)
decorated_with_a_side: return wrapped_and_counted(x)
decorated_by_torch: return under_torch(x)
switches_in_a_context:
    with switched():
        return x
appends_in_a_function_for_a_library: return list(map(lambda v: SEEN.append(v), [x]))
appends_in_a_comprehension: return [SEEN.append(i) for i in range(3)]
empties_a_dictionary: return STATE.pop("last", x)
deletes_an_entry: del STATE["last"]
writes_the_environment: os.environ["MINE"] = str(t)
puts_into_the_environment: os.putenv("MINE", "1")
writes_a_file:
    with open("/tmp/mine", "w") as file:
        json.dump(1, file)
writes_a_path: Path("/tmp/mine").write_text("1")
holds_a_lock:
    with LOCK:
        return self.net(x, t)
holds_a_semaphore:
    LIMIT.acquire()
    try:
        return self.net(x, t)
    finally:
        LIMIT.release()
waits_for_an_event: EVENT.wait()
puts_into_a_queue: LINE.put(x); return LINE.get()
keeps_state_of_threads: LOCAL.n = 1
runs_an_event_loop:
    async def call() -> Any:
        return self.net(x, t)
    return asyncio.run(call())
runs_threads:
    with ThreadPoolExecutor() as pool:
        return pool.submit(self.net, x).result()
asks_for_processes: return multiprocessing.cpu_count()
imports_threads: import threading as threads; threads.Thread(target=print).start()
draws_from_a_stream_of_its_own: return torch.randn(4, generator=STREAM)
swaps_weights:
    weights = {name: 2 * one for name, one in self.net.named_parameters()}
    return torch.func.functional_call(self.net, weights, (x,))
sets_processors: self.unet.set_attn_processor(None)
adds_a_hook:
    handle = self.net.register_forward_hook(lambda *_: None)
    x = self.net(x)
    handle.remove()
chooses_a_kernel:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    with sdpa_kernel(SDPBackend.MATH):
        return self.net(x)
switches_a_backend: torch.backends.cudnn.benchmark = True
writes_on_its_net: self.net.scale = 2.0; return self.net(x)
writes_on_options_of_its_net: self.net.options["scale"] = 2.0; return self.net(x)
scales_weights: self.net.first.weight.data.mul_(2); return self.net(x)
scales_all_weights:
    for weight in self.net.parameters():
        weight.data.mul_(2)
    return self.net(x)
loads_weights: self.net.load_state_dict({}); return self.net(x)
replaces_a_forward: self.net.first.forward = lambda x: x; return self.net(x)
writes_through_a_proxy: PROXY.update(x=1)
""")


@pytest.mark.parametrize("name", [*CLEAN, *PRIVATE])
def test_a_step_is_private_where_it_changes_what_outlives_the_call(name: str) -> None:
    judge(name in PRIVATE, stepping((CLEAN | PRIVATE)[name]))
