"""A small pipeline whose steps, modules and callbacks are a test's own."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from torch import Tensor, nn

from carpool.engine.reach import private_reasons

Case = tuple[Callable[..., Any], str]


class Net(nn.Module):
    """A denoiser that keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.SiLU()])
        self.register_buffer("shift", torch.zeros(4))
        self.options = {"scale": 1.0}

    def forward(self, x: Tensor, t: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.first(x) + self.shift
        return y * self.options["scale"]


class Stepping(DiffusionPipeline):  # type: ignore[misc]
    """Calls its `step` for each timestep, and a callback after it."""

    def __init__(self, net: nn.Module, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(net=net, scheduler=scheduler)

    def step(self, x: Any, t: Any) -> Any:
        return self.net(x, t)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str = "",
        num_inference_steps: int = 3,
        generator: Any = None,
        callback_on_step_end: Any = None,
        helper: Any = None,
    ) -> Any:
        latents = torch.randn(1, 4, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for i, t in enumerate(self.scheduler.timesteps):
            noise = self.step(latents, t)
            latents = self.scheduler.step(noise, t, latents).prev_sample
            if callback_on_step_end is not None:
                changed = callback_on_step_end(self, i, t, {"latents": latents})
                latents = changed.pop("latents", latents)
        return {"images": latents}


def stepping(step: Any = None, net: nn.Module | None = None, **attributes: Any) -> Any:
    """A pipeline with a step of its own."""
    more = {} if step is None else {"step": step}
    cls = type("Mine", (Stepping,), {"__module__": __name__, **more, **attributes})
    return cls(net or Net(), DDIMScheduler())


class Cases:
    """Functions with what is expected of them, in the order in which they are written."""

    def __init__(self) -> None:
        self.all: list[Case] = []

    def clean(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.all.append((function, ""))
        return function

    def private(self, reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Expected with `reason` as a part of a sentence."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.all.append((function, reason))
            return function

        return add


def judge(reason: str, pipe: Any, **arguments: Any) -> None:
    """Check that a request is private if there is a reason, and shares without one."""
    reasons = private_reasons(pipe, arguments)
    assert bool(reasons) == bool(reason), reasons
