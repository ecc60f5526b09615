"""A tiny net, a pipeline over it, and the table of kinds: ways in which people write code.

A kind is a subclass of `Custom` or a function that changes a `Custom` pipeline. Weights and
arguments are the same at every call: a fresh pipeline without Carpool is the judge.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from diffusers import ConfigMixin, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from torch import Tensor, nn

WIDTH, SIDE, WORDS = 8, 8, 3
CLOSE = 2e-5  # float32, shared forwards
FIRST = 1000.0  # the first timestep of any request
BROKEN = "broken"  # the prompt of a request that raises at its second step

REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "cat", "seed": 1, "num_inference_steps": 5, "guidance_scale": 3.0},
    {"prompt": "dog", "seed": 2, "num_inference_steps": 3, "guidance_scale": 1.5},
    {"prompt": "moon", "seed": 3, "num_inference_steps": 6, "guidance_scale": 5.0},
    {"prompt": "sea", "seed": 4, "num_inference_steps": 4, "guidance_scale": 2.0},
)
ODD = "moon"  # the prompt of the one request that does what the others do not


class Net(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A denoiser that looks at its sample, its timestep and its words, row by row."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 1)
        self.words = nn.Linear(width, width)

    def body(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Tensor:
        told = self.words(words).mean(1)[:, :, None, None]
        x = torch.tanh(self.first(sample) + told + timestep[:, None, None, None] / 1000)
        x = x + torch.tanh(self.middle(x))
        answer: Tensor = 2 * self.last(x)
        return answer

    def forward(self, sample: Tensor, timestep: Tensor, words: Tensor) -> Any:
        return (self.body(sample, timestep, words),)


class Custom(DiffusionPipeline):  # type: ignore[misc]
    """The loop that every pipeline has; a kind replaces `begin`, `predict` or `end`."""

    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @property
    def guidance_scale(self) -> float:
        return float(self._guidance_scale)

    @property
    def interrupt(self) -> bool:
        return bool(self._interrupt)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str = "",
        num_inference_steps: int = 5,
        guidance_scale: float = 3.0,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Any = ("latents",),
    ) -> Any:
        self._guidance_scale, self._interrupt = guidance_scale, False
        self.scheduler.set_timesteps(num_inference_steps)
        self._num_timesteps = len(self.scheduler.timesteps)
        x, words = torch.randn(1, 4, SIDE, SIDE, generator=generator), embedded(prompt)
        self.begin(prompt)
        for i, t in enumerate(self.scheduler.timesteps):
            if self.interrupt:
                continue
            if prompt == BROKEN and i == 1:
                raise ValueError("this prompt is broken")
            noise = self.predict(i, x, t.expand(1), words) * (1 + self.guidance_scale / 10)
            x = self.scheduler.step(noise, t, x).prev_sample
            if callback_on_step_end is not None:
                x = (callback_on_step_end(self, i, t, {"latents": x}) or {}).get("latents", x)
        return self.shown(self.end(x), output_type)

    def begin(self, prompt: str) -> None:
        """What a kind does once, after the scheduler has its timesteps."""

    def predict(self, i: int, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        noise: Tensor = self.unet(x, t, words)[0]
        return noise

    def end(self, x: Tensor) -> Tensor:
        return x

    def shown(self, x: Tensor, output_type: str) -> ImagePipelineOutput:
        if output_type != "pil":
            return ImagePipelineOutput(images=x[:, :3])
        array = (x[:, :3] / 4 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().numpy()
        return ImagePipelineOutput(images=self.numpy_to_pil(array))


def embedded(prompt: str) -> Tensor:
    """The words of a prompt, (1, WORDS, WIDTH): no random numbers, no module."""
    codes = [float(ord(letter)) for letter in prompt.ljust(WORDS)[:WORDS]]
    return torch.sin(torch.tensor(codes)[None, :, None] * torch.arange(1, WIDTH + 1) / 7)


@dataclass(frozen=True)
class Kind:
    """A way in which people write code."""

    name: str
    make: Callable[..., Any]  # a class of pipelines, or a function that changes a pipeline
    net: Callable[[], Any] = Net
    scheduler: Callable[[], Any] = FlowMatchEulerDiscreteScheduler
    close: float = CLOSE  # largest difference in a shared forward

    def build(self) -> tuple[Any, Callable[[], dict[str, Any]]]:
        """The pipeline, and what gives the arguments of its own for one more request."""
        cls = self.make if isinstance(self.make, type) else Custom
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe: Any = cls(self.net(), self.scheduler())
        pipe.set_progress_bar_config(disable=True)
        pipe.unet.eval().requires_grad_(False)
        arguments = None if isinstance(self.make, type) else self.make(pipe)
        return pipe, arguments or dict


Made = TypeVar("Made", bound=Callable[..., Any])

KINDS: dict[str, Kind] = {}


def kind(name: str, **options: Any) -> Callable[[Made], Made]:
    """Add a class or a function to the table; `options` are fields of `Kind`."""

    def add(make: Made) -> Made:
        assert name not in KINDS, f"two kinds have the name {name!r}"
        KINDS[name] = Kind(name, make, **options)
        return make

    return add
