"""A small pipeline that makes a mesh of a picture: a sphere that its denoiser has shaped."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import DDIMScheduler
from diffusers.utils import BaseOutput

from carpool.engine.tokenizers import beside_loop
from carpool.errors import NoSurface
from support.odd_pipeline import WIDTH, Net

FACES = np.array([[0, 1, 2], [2, 1, 3], [3, 4, 5]])


@dataclass
class MeshOutput(BaseOutput):  # type: ignore[misc]
    meshes: list[Any]


class MeshPipeline(diffusers.DiffusionPipeline):  # type: ignore[misc]
    def __init__(self, net: Net, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(net=net, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self, image: Any, num_inference_steps: int = 4, generator: torch.Generator | None = None
    ) -> MeshOutput:
        latents: Any = torch.randn(1, 6, WIDTH, generator=generator)
        latents = latents + torch.tensor(np.asarray(image, np.float32)).mean() / 255
        self.scheduler.set_timesteps(num_inference_steps)
        for timestep in self.scheduler.timesteps:
            noise = self.net(latents, timestep)
            latents = self.scheduler.step(noise, timestep, latents).prev_sample
        vertices = latents[0, :, :3].numpy()
        return MeshOutput(meshes=[[SimpleNamespace(vertices=vertices, faces=FACES)]])


class SurfacePipeline(MeshPipeline):
    """Extracts its surface beside the loop, in four chunks: as Hunyuan3D-2 does."""

    parts_after_steps = 8

    def __call__(
        self,
        image: Any,
        num_inference_steps: int = 4,
        generator: torch.Generator | None = None,
        is_empty: bool = False,
    ) -> MeshOutput:
        output = super().__call__(image, num_inference_steps, generator)

        def extract(tell: Callable[[float], None]) -> MeshOutput:
            for chunk in range(5):
                tell(chunk / 4)
            if is_empty:
                raise NoSurface("the shape has no surface")
            return output

        extracted: MeshOutput = beside_loop(extract)
        return extracted


def mesh_pipeline(cls: type[MeshPipeline] = MeshPipeline) -> MeshPipeline:
    """The same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net()
    net.requires_grad_(False)
    pipe = cls(net, DDIMScheduler(num_train_timesteps=1000, clip_sample=False))
    pipe.set_progress_bar_config(disable=True)
    return pipe
