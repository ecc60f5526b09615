"""Modules, schedulers, hooks and replaced code: which keep requests from a shared ride."""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from accelerate.hooks import ModelHook as AccelerateHook  # type: ignore[import-untyped]
from accelerate.hooks import add_hook_to_module
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn

from support.reach import Cases, Net, Stepping, judge, stepping
from support.tiny.stable import sd15

cases = Cases()  # functions that give a pipeline

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


def tripled(plain: Any, x: Any, *args: Any) -> Any:
    return 3 * plain(x, *args)


@cases.clean
def a_net_of_ones_own() -> Any:
    return stepping()


@cases.clean
def nets_inside() -> Any:
    return stepping(net=Nested(Block()))


@cases.private("`Counting.forward` writes `self.n` on the module Counting")
def a_counter() -> Any:
    return stepping(net=Counting())


@cases.private("`self.shift.add_`")
def a_buffer() -> Any:
    return stepping(net=Buffered())


@cases.private("writes `CACHE[...]`")
def a_cache_by_id() -> Any:
    return stepping(net=ById())


@cases.private("`self.store.append`")
def a_list_on_the_class() -> Any:
    return stepping(net=Storing())


@cases.private("which blocks")
def a_lock_in_a_forward() -> Any:
    return stepping(net=Locked())


@cases.private("`Keeping.forward` writes `self.last`")
def a_layer_that_keeps() -> Any:
    return stepping(net=Nested(Keeping()))


@cases.private("`Encoder.encode` writes `self.kept`")
def a_method_beside_the_forward() -> Any:
    return stepping(lambda self, x, t: self.net.encode(x), Encoder())


@cases.clean
def a_method_that_no_call_uses() -> Any:
    return stepping(net=Encoder())


@cases.clean
def pure_processors() -> Any:
    pipe = sd15()
    pipe.unet.set_attn_processor(Pure())
    return pipe


@cases.private("`Store.__call__` writes `self.last`")
def processors_that_keep() -> Any:
    pipe = sd15()
    pipe.unet.set_attn_processor({name: Store() for name in pipe.unet.attn_processors})
    return pipe


@cases.clean
def a_scheduler_of_ones_own() -> Any:
    return stepping_with(Scheduler())


@cases.private("on the class ClassScheduler")
def a_scheduler_with_a_class_attribute() -> Any:
    return stepping_with(ClassScheduler())


@cases.private("writes `CACHE[...]`")
def a_scheduler_without_a_librarys_class() -> Any:
    return stepping_with(Duck())


@cases.clean
def a_pure_hook() -> Any:
    pipe = stepping()
    pipe.net.register_forward_hook(lambda module, args, x: x + 0.3 * x.mean(0, keepdim=True))
    return pipe


@cases.private("box[...]`")
def a_hook_that_keeps() -> Any:
    pipe, box = stepping(), {"last": None}

    def hook(module: Any, args: Any, x: Any) -> Any:
        box["last"] = x

    pipe.net.first.register_forward_hook(hook)
    return pipe


@cases.private("writes `n` of the function around it")
def a_hook_that_counts() -> Any:
    pipe, n = stepping(), 0

    def hook(module: Any, args: Any) -> None:
        nonlocal n
        n += 1

    pipe.net.register_forward_pre_hook(hook)
    return pipe


@cases.private("the pipeline itself as `pipe`")
def a_hook_that_has_the_pipeline() -> Any:
    pipe = stepping()
    pipe.net.register_forward_hook(lambda m, i, o: o * (pipe.scheduler.step_index or 0))
    return pipe


@cases.private("the pipeline itself")
def a_hook_object_that_has_the_pipeline() -> Any:
    pipe = stepping()
    pipe.net.register_forward_hook(Hook(pipe))
    return pipe


@cases.private("`Hook.count` writes `self.n`")
def a_method_as_a_hook() -> Any:
    pipe = stepping()
    pipe.net.register_forward_hook(Hook().count)
    return pipe


@cases.private("on the module Linear")
def a_hook_that_writes_on_its_module() -> Any:
    pipe = stepping()
    pipe.net.first.register_forward_hook(lambda m, i, o: setattr(m, "last", o))

    def hook(module: Any, args: Any, output: Any) -> None:
        module.last = output

    pipe.net.first.register_forward_hook(hook)
    return pipe


@cases.clean
def a_pure_hook_of_diffusers() -> Any:
    pipe = stepping()
    HookRegistry.check_if_exists_or_initialize(pipe.net.first).register_hook(Adding(), "mine")
    return pipe


@cases.private("`Numbering.post_forward` writes `self.n`")
def a_hook_of_diffusers_that_counts() -> Any:
    pipe = stepping()
    HookRegistry.check_if_exists_or_initialize(pipe.net.first).register_hook(Numbering(), "mine")
    return pipe


@cases.clean
def a_pure_forward_in_place() -> Any:
    pipe = stepping()
    plain = pipe.net.forward
    pipe.net.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)
    return pipe


@cases.private("writes `net.count`")
def a_forward_in_place_that_counts() -> Any:
    pipe = stepping()
    net, plain = pipe.net, pipe.net.forward
    net.count = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        net.count += 1
        return plain(*args, **kwargs)

    net.forward = forward
    return pipe


@cases.private("self.count")
def a_bound_forward_that_counts() -> Any:
    pipe = stepping()
    pipe.net.forward = types.MethodType(counting_forward, pipe.net)
    return pipe


@cases.clean
def a_partial_forward() -> Any:
    pipe = stepping()
    pipe.net.forward = functools.partial(tripled, pipe.net.forward)
    return pipe


@cases.private("self.count")
def a_partial_forward_that_counts() -> Any:
    pipe = stepping()
    pipe.net.forward = functools.partial(counting_forward, pipe.net)
    return pipe


@cases.private("writes `CACHE[...]`")
def a_forward_of_an_inner_layer() -> Any:
    pipe = sd15()
    layer = pipe.unet.conv_in
    plain = layer.forward

    @functools.wraps(plain)
    def forward(x: Tensor) -> Any:
        CACHE["x"] = x
        return plain(x)

    layer.forward = forward
    return pipe


@cases.private("on the class Tea")
def a_class_exchanged_as_teacache_does() -> Any:
    class Tea(UNet2DConditionModel):  # type: ignore[misc]
        cnt = 0

        def forward(self, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            Tea.cnt += 1
            return super().forward(sample, *args, **kwargs)

    pipe = sd15()
    pipe.unet.__class__ = Tea
    return pipe


@cases.private("on the module UNet2DConditionModel")
def a_class_exchanged_with_counters_on_the_module() -> Any:
    class Tea(UNet2DConditionModel):  # type: ignore[misc]
        cnt = 0

        def forward(self, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.cnt += 1
            return super().forward(sample, *args, **kwargs)

    Tea.__name__, Tea.__module__ = "UNet2DConditionModel", UNet2DConditionModel.__module__
    pipe = sd15()
    pipe.unet.__class__ = Tea
    return pipe


@cases.private("the pipeline itself as `pipe`")
def a_method_in_place_that_has_the_pipeline() -> Any:
    pipe = stepping()
    pipe.step = lambda x, t: pipe.net(x, t)
    return pipe


@cases.private("which blocks")
def a_lock_on_the_pipeline() -> Any:
    pipe = stepping(lambda self, x, t: self.guarded(x))
    pipe.guard = threading.Lock()

    def guarded(self: Any, x: Any) -> Any:
        with self.guard:
            return self.net(x)

    type(pipe).guarded = guarded
    return pipe


@cases.private("`self.history.append`")
def a_list_on_the_class_of_the_pipeline() -> Any:
    return stepping(lambda self, x, t: self.history.append(x), history=[])


@cases.clean
def a_list_on_the_pipeline() -> Any:
    pipe = stepping(lambda self, x, t: self.history.append(x))
    pipe.history = []
    return pipe


@cases.private("decides at run time")
def a_pipeline_with_attributes_made_up() -> Any:
    def made_up(self: Any, name: str) -> Any:
        if name in CACHE:
            return CACHE[name]
        raise AttributeError(name)

    return stepping(__getattr__=made_up)


@cases.private("writes `CACHE[...]`")
def an_override_that_a_library_calls() -> Any:
    def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        CACHE["prompt"] = args
        above: Any = super(type(self), self)
        return above.encode_prompt(*args, **kwargs)

    pipe = sd15()
    pipe.__class__ = type("Mine", (type(pipe),), {"encode_prompt": encode_prompt})
    return pipe


@cases.clean
def an_override_that_keeps_on_itself() -> Any:
    def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.kept = args
        above: Any = super(type(self), self)
        return above.encode_prompt(*args, **kwargs)

    pipe = sd15()
    pipe.__class__ = type("Mine", (type(pipe),), {"encode_prompt": encode_prompt})
    return pipe


class Switch:
    """Has a method that changes things before requests come."""

    def enable(self) -> None:
        CACHE["is_on"] = True

    def scale(self, x: Any) -> Any:
        return x * 2


@cases.clean
def a_helper_whose_other_methods_change_things() -> Any:
    pipe = stepping(lambda self, x, t: self.switch.scale(x))
    pipe.switch = Switch()
    return pipe


@cases.private("writes `CACHE[...]`")
def a_helper_that_changes_things() -> Any:
    pipe = stepping(lambda self, x, t: self.switch.enable())
    pipe.switch = Switch()
    return pipe


@cases.private("`AlignHook.pre_forward` writes `CACHE[...]`")
def a_hook_of_accelerate() -> Any:
    pipe = stepping()
    add_hook_to_module(pipe.net.first, AlignHook())
    return pipe


@cases.private("a DDIMScheduler")
def a_scheduler_from_outside() -> Any:
    scheduler = DDIMScheduler()
    return stepping(lambda self, x, t: scheduler.step(x, t, x).prev_sample)


@cases.private("a Mine, which keeps the state of calls,")
def another_pipeline_from_outside() -> Any:
    other = stepping()
    return stepping(lambda self, x, t: other("")["images"])


def stepping_with(scheduler: Any) -> Any:
    cls = type("Mine", (Stepping,), {"__module__": __name__})
    pipe = cls(Net(), DDIMScheduler())
    pipe.scheduler = scheduler
    return pipe


@pytest.mark.parametrize(
    ("make", "reason"), cases.all, ids=lambda one: getattr(one, "__name__", "")
)
def test_modules_are_private_where_a_call_leaves_something_on_them(
    make: Callable[[], Any], reason: str
) -> None:
    judge(reason, make())


def test_a_librarys_class_that_was_patched_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = sd15()
    judge("", pipe)
    monkeypatch.setattr(UNet2DConditionModel, "forward", counting_forward)

    judge("`counting_forward` writes `self.count`", sd15())


def test_a_part_that_is_exchanged_is_walked_again() -> None:
    pipe = stepping()
    judge("", pipe)
    pipe.net.register_forward_hook(Hook().count)

    judge("`Hook.count` writes `self.n`", pipe)
