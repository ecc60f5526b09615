"""Heavy methods park inside fibers, do what they always did outside, and come back untouched."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from carpool.engine import intercept
from carpool.engine.fiber import Fiber, Returned
from carpool.engine.numerics import is_followed
from carpool.engine.specs import SPECS
from carpool.types import Phase, phase_of


class Doubler(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        """Twice as much."""
        return 2 * x * scale + shift


class Autoencoder(nn.Module):
    def encode(self, x: Tensor) -> Tensor:
        return x / 2

    def decode(self, z: Tensor) -> Tensor:
        return z * 2

    def forward(self, x: Tensor) -> Any:
        return self.decode(self.encode(x))


class Writer(nn.Module):
    """Generates token by token, as a language model does."""

    def can_generate(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self(x)
        return x


class Mute(Writer):
    def can_generate(self) -> bool:
        return False


ONE = torch.ones(1)


class Once(ModelHook):  # type: ignore[misc]
    """Takes itself off after the first forward, as diffusers' lazy prefetching does."""

    def post_forward(self, module: Any, output: Any) -> Any:
        module._diffusers_hook.remove_hook("once", recurse=False)
        return output


@contextmanager
def intercepting(**components: Any) -> Iterator[intercept.Interception]:
    interception = intercept.Interception(components)
    interception.install()
    try:
        yield interception
    finally:
        interception.remove()


def test_inside_a_fiber_a_call_parks_with_its_arguments() -> None:
    module = Doubler()

    with intercepting(transformer=module):
        fiber = Fiber(lambda: module(ONE, 3.0, shift=1.0))
        call = fiber.start()

        assert isinstance(call, intercept.Call)
        assert (call.target.component, call.target.method) == ("transformer", "forward")
        assert call.target.module is module
        assert call.arguments() == {"x": ONE, "scale": 3.0, "shift": 1.0}
        assert call.target.original(*call.args, **call.kwargs) == 7
        assert fiber.resume("an answer") == Returned("an answer")


def test_it_can_be_installed_again() -> None:
    module = Doubler()
    interception = intercept.Interception({"transformer": module})

    for _ in range(2):
        interception.install()
        assert isinstance(Fiber(lambda: module(ONE)).start(), intercept.Call)
        interception.remove()
        assert Fiber(lambda: module(ONE)).start() == Returned(2 * ONE)


class Alone:
    """The context of a fiber that shares nothing."""

    is_running = False
    watch = None  # no prompt is written anew

    def __init__(self) -> None:
        self._generating = list[nn.Module]()

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def own(self, target: intercept.Target) -> intercept.Target:
        return target

    @contextmanager
    def generating(self, component: nn.Module) -> Iterator[None]:
        self._generating.append(component)
        yield
        self._generating.pop()

    def is_generating(self, component: nn.Module) -> bool:
        return component in self._generating


def calls_of(body: Any) -> tuple[list[intercept.Call], Any]:
    """The calls on which a body parks, each answered as plain code would be, and its result."""
    fiber, calls = Fiber(body, Alone()), list[intercept.Call]()
    came = fiber.start()
    while isinstance(came, intercept.Call):
        calls.append(came)
        came = fiber.resume(came.target.original(*came.args, **came.kwargs))
    assert isinstance(came, Returned)
    return calls, came.value


def test_each_token_of_a_text_is_a_call() -> None:
    writer = Writer()

    with intercepting(text_encoder=writer) as interception:
        calls, text = calls_of(lambda: writer(writer.generate(ONE)))

        assert [call.target.method for call in calls] == ["generate"] * 3 + ["forward"]
        assert [target.method for target in interception.targets] == ["forward", "generate"]
        assert text == 5


class Captioner(nn.Module):
    """Has a `generate` of its own, which calls its parts; a part generates by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes, self.layers, self.language = Doubler(), nn.ModuleList([Doubler()]), Writer()

    can_generate = Writer.can_generate

    def forward(self, x: Tensor) -> Any:
        return self.layers[0](self.eyes(x))

    def generate(self, x: Tensor) -> Any:
        return self.language.generate(self.layers[0](self.eyes(x)))


def test_the_parts_that_a_generate_of_its_own_calls_are_calls_while_it_runs() -> None:
    captioner = Captioner()
    with intercepting(captioner=captioner):
        calls, text = calls_of(lambda: captioner.eyes(captioner.generate(ONE)))

    assert text == 14
    assert [call.target.method for call in calls] == ["generate"] * 5
    assert {call.target.module for call in calls} == {captioner}
    assert vars(captioner.eyes).keys() == vars(Doubler()).keys()


def test_what_would_compile_a_token_does_not_compile_the_pause() -> None:
    writer: Any = Writer()
    writer.get_compiled_call = lambda config: "compiled"

    with intercepting(text_encoder=writer):
        calls, text = calls_of(lambda: writer.get_compiled_call(None)(ONE))

        assert (len(calls), text) == (1, 2)
        assert writer.get_compiled_call(None) == "compiled"


def test_an_autoencoder_is_met_at_its_two_ends() -> None:
    vae = Autoencoder()

    with intercepting(vae=vae):
        fiber = Fiber(lambda: vae.decode(vae.encode(ONE)))
        calls = [fiber.start().target.method, fiber.resume(ONE).target.method]
        fiber.close()

    assert calls == ["encode", "decode"]


def test_other_modules_inside_a_component_are_left_alone() -> None:
    inner = Doubler()

    with intercepting(transformer=nn.Sequential(inner)):
        assert Fiber(lambda: inner(ONE)).start() == Returned(2 * ONE)


def test_a_module_under_two_names_is_met_once() -> None:
    module = Doubler()

    with intercepting(text_encoder=module, text_encoder_2=module) as interception:
        assert [target.component for target in interception.targets] == ["text_encoder"]


def test_what_is_no_module_is_no_component() -> None:
    with intercepting(scheduler=object(), tokenizer=None, size=5) as interception:
        assert not interception.targets


def test_the_signature_stays_as_it_was() -> None:
    module = Doubler()
    before = inspect.signature(module.forward)

    with intercepting(transformer=module):
        assert inspect.signature(module.forward) == before
        assert module.forward.__doc__ == "Twice as much."
        assert module.forward.__name__ == "forward"


@pytest.mark.parametrize("has_own_forward", [False, True])
def test_removing_leaves_the_module_exactly_as_it_was(has_own_forward: bool) -> None:
    module = Doubler()
    if has_own_forward:  # as accelerate's hooks and quantizers leave it
        module.__dict__["forward"] = lambda x: x
    before = dict(module.__dict__)

    with intercepting(transformer=module) as interception:
        assert module.__dict__ != before

    interception.remove()  # a second time is harmless
    assert module.__dict__.keys() == before.keys()
    assert all(module.__dict__[name] is before[name] for name in before)


def test_an_own_forward_is_what_a_call_means() -> None:
    module = Doubler()
    module.__dict__["forward"] = lambda x: x - 5

    with intercepting(transformer=module):
        call = Fiber(lambda: module(ONE)).start()

        assert call.target.original(*call.args) == -4
        assert module(ONE) == -4


def test_a_method_that_takes_anything_never_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Anything(nn.Module):
        def forward(self, *args: Any) -> Any:
            return args

    spec = SPECS["CLIPTextModel", "forward"]
    monkeypatch.setitem(SPECS, ("Anything", "forward"), spec)
    monkeypatch.setitem(SPECS, ("Doubler", "forward"), spec)

    targets = intercept.Interception({"one": Anything(), "two": Doubler()}).targets

    assert [target.spec for target in targets] == [None, spec]


@pytest.mark.parametrize(
    ("module", "methods"),
    [
        (Doubler(), ["forward"]),
        (Autoencoder(), ["encode", "decode"]),
        (Writer(), ["forward", "generate"]),
        (Mute(), ["forward"]),
    ],
)
def test_heavy_methods_are_found(module: nn.Module, methods: list[str]) -> None:
    assert intercept.methods_of(module) == methods


@pytest.mark.parametrize(
    ("component", "method", "phase"),
    [
        ("text_encoder", "forward", "encode"), ("text_encoder_3", "forward", "encode"),
        ("text_encoder", "generate", "encode"), ("image_encoder", "forward", "encode"),
        ("connectors", "forward", "encode"), ("vae", "encode", "encode"),
        ("transformer", "forward", "denoise"), ("transformer_2", "forward", "denoise"),
        ("unet", "forward", "denoise"), ("controlnet", "forward", "denoise"),
        ("vae", "decode", "decode"), ("vocoder", "forward", "decode"),
        ("safety_checker", "forward", "decode"),
    ],
)  # fmt: skip
def test_a_method_belongs_to_a_phase(component: str, method: str, phase: Phase) -> None:
    assert phase_of(component, method) == phase


def test_calls_park_after_a_hook_has_put_another_forward_in_place() -> None:
    module = Doubler()
    HookRegistry.check_if_exists_or_initialize(module).register_hook(Once(), "once")

    with intercepting(transformer=module) as interception:
        for _ in range(2):
            call = Fiber(lambda: module(ONE)).start()
            assert isinstance(call, intercept.Call)
            assert call.target.original(ONE) == 2
        interception.check()

    assert module(ONE) == 2


def test_calls_of_a_module_that_was_compiled_as_a_whole_park_and_run_compiled() -> None:
    module, ran = Doubler(), []

    def backend(graph: Any, inputs: Any) -> Any:
        ran.append(graph)
        return graph.forward

    module.compile(backend=backend)
    with intercepting(transformer=module):
        call = Fiber(lambda: module(ONE)).start()

        assert isinstance(call, intercept.Call)
        assert intercept.is_compiled(module)
        assert call.target.original(ONE) == 2
        assert len(ran) == 1

    assert intercept.is_compiled(module)


def test_an_intercepted_module_does_not_count_as_compiled() -> None:
    module = Doubler()

    with intercepting(transformer=module):
        assert not intercept.is_compiled(module)
        assert is_followed(module)


def test_a_method_that_somebody_replaces_meanwhile_is_named() -> None:
    module = Doubler()

    with intercepting(transformer=module) as interception:
        interception.check()
        module._compiled_call_impl = module._call_impl
        with pytest.raises(RuntimeError, match=r"transformer\.forward was replaced while"):
            interception.check()


def test_a_listener_is_told_of_compilations_and_of_nothing_where_nothing_is_compiled() -> None:
    module, plain = Doubler(), Doubler()
    heard: list[str] = []
    notes = [partial(heard.append, note) for note in ("compiling", "compiled")]
    module.compile(backend="eager", dynamic=False)

    intercept.tell_of_compilations([plain], *notes)()
    stop = intercept.tell_of_compilations([nn.Sequential(module)], *notes)
    module(torch.ones(3, 5))
    module(torch.ones(3, 5))
    stop()
    module(torch.ones(7, 2))

    assert heard == ["compiling", "compiled"]
