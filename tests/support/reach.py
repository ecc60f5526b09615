"""A small pipeline whose steps, modules and callbacks are a test's own."""

import itertools
import linecache
import re
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from torch import Tensor, nn

from carpool.engine.reach import private_reasons

_files = itertools.count()


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


def written(
    space: dict[str, Any], text: str, arguments: str = "self, x, t", answer: str = "x"
) -> dict[str, Callable[..., Any]]:
    """Functions by name, of a text with `name: body` for each; `space` has the names they use."""
    code, functions, file = "", dict[str, Callable[..., Any]](), f"/nowhere/{next(_files)}.py"
    for part in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        name, body = part.split(":", 1)
        code += f"def {name}({arguments}):\n    {body.lstrip(' ')}    return {answer}\n"
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    exec(compile(code, file, "exec"), space, functions)
    return functions


def judge(is_private: bool, pipe: Any, **arguments: Any) -> None:
    """Check whether a request has a reason to be private."""
    reasons = private_reasons(pipe, arguments)
    assert bool(reasons) == is_private, reasons
