"""A small pipeline of a user's own, in which one request may do anything in one of its steps."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers import ConfigMixin, DDIMScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from torch import Tensor, nn

STEPS, ODD_STEP = 5, 2
WIDTH = 16

Odd = Callable[[Any, Tensor, Tensor], Any]
"""What a request does, with its pipeline, latents and timestep; None: the latents stay."""


class Net(ModelMixin, ConfigMixin):  # type: ignore[misc]
    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, sample: Any, timestep: Any = None, extra: Any = None) -> Any:
        if callable(extra):
            extra(sample)
        return self.last(torch.tanh(self.first(sample)))


class OddPipeline(diffusers.DiffusionPipeline):  # type: ignore[misc]
    def __init__(self, net: Net, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(net=net, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str = "",
        num_inference_steps: int = STEPS,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
        odd: Any = None,
    ) -> Any:
        latents: Any = torch.randn(1, 4, 4, WIDTH, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for step, timestep in enumerate(self.scheduler.timesteps):
            if step == ODD_STEP and odd is not None:
                changed = odd(self, latents, timestep)
                latents = latents if changed is None else changed
            noise = self.net(latents, timestep)
            latents = self.scheduler.step(noise, timestep, latents).prev_sample
        if not isinstance(latents, Tensor):
            return latents
        colours = latents[..., :3]
        if output_type == "pil":
            images: Any = self.numpy_to_pil(colours.clamp(0, 1).float().numpy())
        else:
            images = colours.permute(0, 3, 1, 2)
        return ImagePipelineOutput(images=images)


def odd_pipeline() -> OddPipeline:
    """The same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net()
    net.requires_grad_(False)
    pipe = OddPipeline(net, DDIMScheduler(num_train_timesteps=1000, clip_sample=False))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn_alone(seed: int, odd: Odd | None = None, **parameters: Any) -> Any:
    """The picture of plain diffusers, or the class of what it raises."""
    generator = torch.Generator().manual_seed(seed)
    try:
        return odd_pipeline()(generator=generator, odd=odd, output_type="pt", **parameters).images
    except BaseException as error:  # of any kind: it is what is compared
        return type(error)
