"""Modes and switches that a request's code turns: its modules run in them, and no other request."""

import contextlib
import decimal
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from carpool.engine import switches
from support.engine_driver import Recorder, driving
from support.isolation import OneNet

THREADS = torch.get_num_threads()
SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


class Net(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """What it gives tells in which modes and with which switches it ran."""

    config_name = "config.json"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        shift = 0.25 * (y.dtype == torch.bfloat16) + sum(map(float, readings())) / 64
        z: Tensor = 0.5 * y + shift * SCALE.get()
        return z


def readings() -> list[bool | float]:
    """Of modes and switches, each with a weight of its own."""
    facts = [
        torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"), torch.is_autocast_cache_enabled(),
        torch.is_inference_mode_enabled(), torch.get_default_dtype() == torch.float64,
        torch.get_float32_matmul_precision() == "high",
        torch.are_deterministic_algorithms_enabled(), torch._C._get_flash_sdp_enabled(),
        torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled, torch.get_num_threads() == 3,
        np.geterr()["divide"] == "raise", decimal.getcontext().prec == 5,
        "CARPOOL_TEST_SWITCH" in os.environ, os.getcwd() == "/",
        any(one[0] == "error" for one in warnings.filters), torch.is_anomaly_enabled(),
        torch.zeros(1).is_meta, torch.get_autocast_dtype("cpu") == torch.float16,
    ]  # fmt: skip
    return [2**-place * fact for place, fact in enumerate(facts)]


@contextmanager
def turned(turn: Callable[[], object], back: Callable[[], object]) -> Iterator[None]:
    turn()
    try:
        yield
    finally:
        back()


class Doubling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Doubles what linear layers give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        return 2 * answer if "addmm" in str(func) else answer


def set_scale() -> AbstractContextManager[None]:
    token = SCALE.set(2.0)
    return turned(lambda: None, lambda: SCALE.reset(token))


def filter_warnings() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("error")
    return stack


def entered(*contexts: AbstractContextManager[Any]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for one in contexts:
        stack.enter_context(one)
    return stack


KEPT: list[Any] = []  # contexts that requests have entered and not left
WITH: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast without its cache": lambda: torch.autocast("cpu", cache_enabled=False),
    "nested autocast": lambda: entered(
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ),
    "autocast switched off inside": lambda: entered(
        torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)
    ),
    "autocast of another device": lambda: turned(
        lambda: torch.set_autocast_enabled("cuda", True),
        lambda: torch.set_autocast_enabled("cuda", False),
    ),
    "inference mode": torch.inference_mode,
    "inference mode in autocast": lambda: entered(
        torch.autocast("cpu", torch.bfloat16), torch.inference_mode()
    ),
    "gradients": lambda: torch.set_grad_enabled(True),
    "default number type": lambda: turned(
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "precision of float32": lambda: turned(
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "deterministic algorithms": lambda: turned(
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "kernel of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "flags of cuDNN": lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
    "flags of oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "threads": lambda: turned(
        lambda: torch.set_num_threads(3), lambda: torch.set_num_threads(THREADS)
    ),
    "numpy's errors": lambda: np.errstate(divide="raise"),
    "decimal context": lambda: decimal.localcontext(decimal.Context(prec=5)),
    "context variable": set_scale,
    "environment": lambda: turned(
        lambda: os.environ.update(CARPOOL_TEST_SWITCH="1"),
        lambda: os.environ.pop("CARPOOL_TEST_SWITCH", None),
    ),
    "folder": lambda: contextlib.chdir("/"),
    "filters of warnings": filter_warnings,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "device": lambda: torch.device("meta"),
    "dispatch mode": Doubling,
}


class Turning(OneNet):
    """Calls its denoiser inside of a context, and tells what it sees itself after each call."""

    def __call__(
        self,
        prompt: str | None = None,
        num_inference_steps: int = 4,
        inside: str = "",
        is_kept: bool = False,
        fails: bool = False,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        x = torch.randn(1, 4, generator=generator)
        for step in range(num_inference_steps):
            x = self.net(x).detach().float().clone()
            context: Any = WITH.get(inside, contextlib.nullcontext)
            if is_kept and step == 0:
                kept = context()  # over all calls, and left by nobody
                kept.__enter__()
                KEPT.append(kept)
            with contextlib.nullcontext() if is_kept else context():
                x = self.net(x).detach() + sum(map(float, readings()))
            if fails and step == 1:
                raise ValueError("on purpose")
            x = x.float() + sum(map(float, readings()))
        return {"images": x.clone()}


def made() -> Turning:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Turning(Net().requires_grad_(False).eval())


def state() -> list[Any]:
    values = [switch.get() for switch in switches.TABLE]
    return [*values, torch.get_num_threads(), np.geterr(), decimal.getcontext().prec, readings()]


def alone(seed: int, **arguments: Any) -> Tensor:
    """What plain diffusers gives; the switches are put back afterwards."""
    before = switches.Switches()
    before.enter()
    with torch.no_grad():
        image = made()("", generator=torch.Generator().manual_seed(seed), **arguments)["images"]
    before.leave()
    return image


def far(recorder: Recorder, expected: Tensor) -> float:
    return float((recorder.image - expected).abs().max())


@pytest.mark.parametrize(("numerics", "isolation"), [("fast", "auto"), ("exact", "shared")])
@pytest.mark.parametrize("inside", WITH)
def test_a_module_called_inside_of_a_context_runs_in_it_and_no_other_request_does(
    inside: str, numerics: str, isolation: str
) -> None:
    before = state()
    with driving(made(), numerics=numerics, isolation=isolation) as drive:
        usual = [drive.submit("", seed=seed) for seed in (1, 2)]
        turning = [drive.submit("", seed=3 + n, inside=inside) for n in range(2)]
        failing = drive.submit("", seed=5, inside=inside, fails=True)
        cancelled = drive.submit("", seed=6, inside=inside, request_id="cancelled")
        drive.turn(5)
        drive.engine.cancel("cancelled")
        drive.finish()
        later = drive.submit("", seed=7)
        drive.finish()

    assert failing.error is not None
    assert cancelled.error is not None
    close = 0.0 if numerics == "exact" else 1e-6
    assert max(far(one, alone(1 + n)) for n, one in enumerate(usual)) <= close
    assert max(far(one, alone(3 + n, inside=inside)) for n, one in enumerate(turning)) <= close
    assert far(later, alone(7)) <= close
    assert state() == before


KEPT_KINDS = [
    *("default number type", "precision of float32", "kernel of attention", "flags of cuDNN"),
    *("threads", "numpy's errors", "decimal context", "environment", "folder"),
    *("filters of warnings", "autocast", "dispatch mode"),
]


@pytest.mark.parametrize("inside", KEPT_KINDS)
def test_what_a_request_never_turns_back_is_turned_back_at_its_end(inside: str) -> None:
    before = state()
    with driving(made(), isolation="shared") as drive:
        usual = [drive.submit("", seed=seed) for seed in (1, 2)]
        turning = [drive.submit("", seed=3 + n, inside=inside, is_kept=True) for n in range(2)]
        failing = drive.submit("", seed=5, inside=inside, is_kept=True, fails=True)
        cancelled = drive.submit("", seed=6, inside=inside, is_kept=True, request_id="cancelled")
        drive.turn(5)
        drive.engine.cancel("cancelled")
        drive.finish()

    assert failing.error is not None
    assert cancelled.error is not None
    assert max(far(one, alone(1 + n)) for n, one in enumerate(usual)) <= 1e-6
    assert turning[0].image.shape == turning[1].image.shape == (1, 4)
    assert state() == before
    KEPT.clear()


@pytest.mark.parametrize("mode", ["inference mode", "autocast"])
def test_calls_in_one_mode_share_forwards_and_others_do_not_share_theirs(mode: str) -> None:
    with driving(made(), isolation="shared") as drive:
        recorders = [drive.submit("", seed=seed, inside=mode) for seed in range(2)]
        recorders += [drive.submit("", seed=seed) for seed in range(2)]
        drive.finish()

    arguments = [{"inside": mode}] * 2 + [{}] * 2
    for place, (recorder, more) in enumerate(zip(recorders, arguments, strict=True)):
        assert far(recorder, alone(place % 2, **more)) < 1e-6

    assert drive.widest("net") == 2 * 2
    assert 2 in drive.widths("net")


def test_weights_that_change_between_two_autocasts_are_cast_again() -> None:
    """While another request stands in an autocast of its own, whose cache must not serve others."""

    class Learning(Turning):
        def __call__(  # type: ignore[override]
            self, prompt: str | None = None, waits: bool = False, generator: Any = None
        ) -> dict[str, Tensor]:
            x = torch.randn(1, 4, generator=generator)
            if waits:
                with torch.autocast("cpu", torch.bfloat16):
                    for _ in range(6):
                        x = self.net(x).float()
                return {"images": x}
            own = nn.Linear(4, 4, bias=False)
            nn.init.eye_(own.weight)
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    x = own(x).float()
                x = self.net(x)
                with torch.no_grad():
                    own.weight.mul_(2.0)
            return {"images": x}

    judge = Learning(made().net)
    with driving(Learning(made().net)) as drive:
        waiting = drive.submit("", seed=1, waits=True)
        learning = drive.submit("", seed=2)
        drive.finish()

    with torch.no_grad():
        for recorder, seed, waits in ((waiting, 1, True), (learning, 2, False)):
            given = torch.Generator().manual_seed(seed)
            assert far(recorder, judge("", waits=waits, generator=given)["images"]) < 1e-6


@pytest.mark.parametrize("switch", switches.TABLE, ids=lambda one: one.name)
def test_a_switch_set_to_its_value_changes_nothing(switch: switches.Turnable) -> None:
    request, before = switches.Switches(), state()
    request.enter()
    switch.set(switch.get())
    request.leave()
    assert state() == before
