"""Modules, schedulers, hooks and replaced code: which keep requests from a shared ride."""

# ruff: noqa: F401 (texts use what is imported)

import functools
import threading
import types
from typing import Any, ClassVar

import pytest
import torch
from accelerate.hooks import ModelHook as AccelerateHook  # type: ignore[import-untyped]
from accelerate.hooks import add_hook_to_module
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn

from support.reach import Net, Stepping, judge, stepping, written
from support.tiny import tiny_pipeline

made = functools.partial(written, globals(), arguments="pipe", answer="pipe")

CACHE: dict[Any, Any] = {}
LOCK = threading.Lock()


class Counting(Net):
    n = 0

    def forward(self, x: Tensor, t: Any = None) -> Tensor:
        self.n += 1
        return super().forward(x, t)


class Buffered(Net):
    def forward(self, x: Tensor, t: Any = None) -> Tensor:
        self.shift.add_(1)  # type: ignore[operator]
        return super().forward(x, t)


class ById(Net):
    def forward(self, x: Tensor, t: Any = None) -> Tensor:
        if id(x) not in CACHE:
            CACHE[id(x)] = x * 2
        y: Tensor = super().forward(x, t) + CACHE[id(x)]
        return y


class Storing(Net):
    store: ClassVar[list[Any]] = []

    def forward(self, x: Tensor, t: Any = None) -> Tensor:
        self.store.append(x)
        return super().forward(x, t)


class Locked(Net):
    def forward(self, x: Tensor, t: Any = None) -> Tensor:
        with LOCK:
            return super().forward(x, t)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Keeping(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x  # type: ignore[assignment]
        return super().forward(x)


class Nested(Net):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.sizes: list[int] = [1, 2]

    def forward(self, x: Tensor, t: Any = None) -> Tensor:
        residuals = [self.block(x)]
        for size in self.sizes:
            residuals.append(residuals[-1] * size)
        x = torch.stack(residuals).sum(0) + self._more(x)
        return super().forward(x, t)

    def _more(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape).add_(1)


class Encoder(Net):
    def encode(self, x: Tensor) -> Tensor:
        self.kept = x
        return x


class Pure:
    """An attention processor."""

    scale = 1.0

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = AttnProcessor()(attn, hidden_states, *args, **kwargs)
        return x + self.scale * x.mean(0, keepdim=True)


class Store:
    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = AttnProcessor()(attn, hidden_states, *args, **kwargs)
        self.last = x
        return x


class Scheduler(DDIMScheduler):  # type: ignore[misc]
    """Keeps its state on itself."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        self.history = [args[0]]
        self.history.append(args[0])
        return super().step(*args, **kwargs)


class ClassScheduler(DDIMScheduler):  # type: ignore[misc]
    count = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        type(self).count += 1
        return super().step(*args, **kwargs)


class Duck:
    """A scheduler without a library's class."""

    def __init__(self) -> None:
        self.timesteps = torch.arange(3)

    def set_timesteps(self, n: int) -> None:
        self.timesteps = torch.arange(n)

    def step(self, noise: Any, t: Any, x: Any) -> Any:
        CACHE["last"] = x
        return x


class Adding(ModelHook):  # type: ignore[misc]
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + 1


class Numbering(ModelHook):  # type: ignore[misc]
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.n = 1
        return output


class AlignHook(AccelerateHook):  # type: ignore[misc]
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        CACHE["args"] = args
        return args, kwargs


class Hook:
    def __init__(self, pipe: Any = None) -> None:
        self.pipe, self.n = pipe, 0

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output * (1 + (self.pipe.scheduler.step_index or 0))

    def count(self, *_: Any) -> None:
        self.n += 1


def counting_forward(self: Any, x: Tensor, t: Any = None) -> Any:
    self.count = getattr(self, "count", 0) + 1
    return self.first(x)


def registered(module: nn.Module, hook: ModelHook) -> None:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "mine")


def tripled(plain: Any, x: Any, *args: Any) -> Any:
    return 3 * plain(x, *args)


class Switch:
    """Has a method that changes things before requests come."""

    def enable(self) -> None:
        CACHE["is_on"] = True

    def scale(self, x: Any) -> Any:
        return x * 2


def stepping_with(scheduler: Any) -> Any:
    cls = type("Mine", (Stepping,), {"__module__": __name__})
    pipe = cls(Net(), DDIMScheduler())
    pipe.scheduler = scheduler
    return pipe


CLEAN = made("""
a_net_of_ones_own: pass
nets_inside: pipe = stepping(net=Nested(Block()))
a_method_that_no_call_uses: pipe = stepping(net=Encoder())
pure_processors: pipe = tiny_pipeline("sd15"); pipe.unet.set_attn_processor(Pure())
a_scheduler_of_ones_own: pipe = stepping_with(Scheduler())
a_pure_hook: pipe.net.register_forward_hook(lambda m, args, x: x + 0.3 * x.mean(0, keepdim=True))
a_pure_hook_of_diffusers: registered(pipe.net.first, Adding())
a_pure_forward_in_place:
    plain = pipe.net.forward
    pipe.net.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)
a_partial_forward: pipe.net.forward = functools.partial(tripled, pipe.net.forward)
a_list_on_the_pipeline:
    pipe = stepping(lambda self, x, t: self.history.append(x))
    pipe.history = []
an_override_that_keeps_on_itself:
    def encode_prompt(self, *args, **kwargs):
        self.kept = args
        above = super(type(self), self)
        return above.encode_prompt(*args, **kwargs)
    pipe = tiny_pipeline("sd15")
    pipe.__class__ = type("Mine", (type(pipe),), {"encode_prompt": encode_prompt})
a_helper_whose_other_methods_change_things:
    pipe = stepping(lambda self, x, t: self.switch.scale(x))
    pipe.switch = Switch()
""")
PRIVATE = made("""
a_counter: pipe = stepping(net=Counting())
a_buffer: pipe = stepping(net=Buffered())
a_cache_by_id: pipe = stepping(net=ById())
a_list_on_the_class: pipe = stepping(net=Storing())
a_lock_in_a_forward: pipe = stepping(net=Locked())
a_layer_that_keeps: pipe = stepping(net=Nested(Keeping()))
a_method_beside_the_forward: pipe = stepping(lambda self, x, t: self.net.encode(x), Encoder())
processors_that_keep:
    pipe = tiny_pipeline("sd15")
    pipe.unet.set_attn_processor({name: Store() for name in pipe.unet.attn_processors})
a_scheduler_with_a_class_attribute: pipe = stepping_with(ClassScheduler())
a_scheduler_without_a_librarys_class: pipe = stepping_with(Duck())
a_hook_that_keeps:
    box = {"last": None}
    def hook(module, args, x):
        box["last"] = x
    pipe.net.first.register_forward_hook(hook)
a_hook_that_counts:
    n = 0
    def hook(module, args):
        nonlocal n
        n += 1
    pipe.net.register_forward_pre_hook(hook)
a_hook_that_has_the_pipeline:
    pipe.net.register_forward_hook(lambda m, i, o: o * (pipe.scheduler.step_index or 0))
a_hook_object_that_has_the_pipeline: pipe.net.register_forward_hook(Hook(pipe))
a_method_as_a_hook: pipe.net.register_forward_hook(Hook().count)
a_hook_that_writes_on_its_module:
    pipe.net.first.register_forward_hook(lambda m, i, o: setattr(m, "last", o))
    def hook(module, args, output):
        module.last = output
    pipe.net.first.register_forward_hook(hook)
a_hook_of_diffusers_that_counts: registered(pipe.net.first, Numbering())
a_forward_in_place_that_counts:
    net, plain = pipe.net, pipe.net.forward
    net.count = 0
    def forward(*args, **kwargs):
        net.count += 1
        return plain(*args, **kwargs)
    net.forward = forward
a_bound_forward_that_counts: pipe.net.forward = types.MethodType(counting_forward, pipe.net)
a_partial_forward_that_counts: pipe.net.forward = functools.partial(counting_forward, pipe.net)
a_forward_of_an_inner_layer:
    pipe = tiny_pipeline("sd15")
    layer = pipe.unet.conv_in
    plain = layer.forward
    @functools.wraps(plain)
    def forward(x):
        CACHE["x"] = x
        return plain(x)
    layer.forward = forward
a_class_exchanged_as_teacache_does:
    class Tea(UNet2DConditionModel):
        cnt = 0
        def forward(self, sample, *args, **kwargs):
            Tea.cnt += 1
            return super().forward(sample, *args, **kwargs)
    pipe = tiny_pipeline("sd15")
    pipe.unet.__class__ = Tea
a_class_exchanged_with_counters_on_the_module:
    class Tea(UNet2DConditionModel):
        cnt = 0
        def forward(self, sample, *args, **kwargs):
            self.cnt += 1
            return super().forward(sample, *args, **kwargs)
    Tea.__name__, Tea.__module__ = "UNet2DConditionModel", UNet2DConditionModel.__module__
    pipe = tiny_pipeline("sd15")
    pipe.unet.__class__ = Tea
a_method_in_place_that_has_the_pipeline: pipe.step = lambda x, t: pipe.net(x, t)
a_lock_on_the_pipeline:
    pipe = stepping(lambda self, x, t: self.guarded(x))
    pipe.guard = threading.Lock()
    def guarded(self, x):
        with self.guard:
            return self.net(x)
    type(pipe).guarded = guarded
a_list_on_the_class_of_the_pipeline:
    pipe = stepping(lambda self, x, t: self.history.append(x), history=[])
a_pipeline_with_attributes_made_up:
    def made_up(self, name: str):
        if name in CACHE:
            return CACHE[name]
        raise AttributeError(name)
    pipe = stepping(__getattr__=made_up)
an_override_that_a_library_calls:
    def encode_prompt(self, *args, **kwargs):
        CACHE["prompt"] = args
        above = super(type(self), self)
        return above.encode_prompt(*args, **kwargs)
    pipe = tiny_pipeline("sd15")
    pipe.__class__ = type("Mine", (type(pipe),), {"encode_prompt": encode_prompt})
a_helper_that_changes_things:
    pipe = stepping(lambda self, x, t: self.switch.enable())
    pipe.switch = Switch()
a_hook_of_accelerate: add_hook_to_module(pipe.net.first, AlignHook())
a_scheduler_from_outside:
    scheduler = DDIMScheduler()
    pipe = stepping(lambda self, x, t: scheduler.step(x, t, x).prev_sample)
another_pipeline_from_outside:
    other = stepping()
    pipe = stepping(lambda self, x, t: other("")["images"])
""")


@pytest.mark.parametrize("name", [*CLEAN, *PRIVATE])
def test_modules_are_private_where_a_call_leaves_something_on_them(name: str) -> None:
    judge(name in PRIVATE, (CLEAN | PRIVATE)[name](stepping()))


def test_a_librarys_class_that_was_patched_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny_pipeline("sd15")
    judge(False, pipe)
    monkeypatch.setattr(UNet2DConditionModel, "forward", counting_forward)

    judge(True, tiny_pipeline("sd15"))


def test_a_part_that_is_exchanged_is_walked_again() -> None:
    pipe = stepping()
    judge(False, pipe)
    pipe.net.register_forward_hook(Hook().count)

    judge(True, pipe)
