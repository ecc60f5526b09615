"""The few-step sampler of distilled models: FastWan by distribution matching, TurboWan by rCM.

At each of a few fixed noise levels the model's velocity gives a whole clean sample, and fresh noise
takes it to the next level; there is no solver in between. Diffusers has no such scheduler for Wan.

Source: Yin et al., "Improved Distribution Matching Distillation for Fast Image Synthesis"
(NeurIPS 2024), section 4.4; the levels are FastWan2.2-TI2V-5B-FullAttn's in training.
Zheng et al., "Large Scale Diffusion Distillation via Score-Regularized Continuous-Time Consistency"
(rCM, 2025): the same step between levels of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput
from torch import Tensor

LEVELS = (1000, 757, 522)


@dataclass
class DMDOutput(BaseOutput):  # type: ignore[misc]
    prev_sample: Tensor


class DMDScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """Samples at fixed noise levels, with fresh noise in between.

    Args:
        levels: timesteps, 0-1000, descending; their number limits the steps.
        num_train_timesteps: the timestep of pure noise.
        rounds_timesteps: whether timesteps are rounded to bfloat16 for the model.
    """

    order = 1
    config_name = "scheduler_config.json"

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        levels: tuple[float, ...] = LEVELS,
        num_train_timesteps: int = 1000,
        rounds_timesteps: bool = False,
    ) -> None:
        self.generator = torch.Generator()  # the request's: pipelines pass none to `step`
        self.timesteps = torch.tensor(levels)
        self.sigmas = torch.zeros(1)  # noise share at each step, 0 after the last
        self._step_index: int | None = None

    @property
    def init_noise_sigma(self) -> float:
        """The share of noise in the first sample."""
        return float(self.config.levels[0] / self.config.num_train_timesteps)

    @property
    def step_index(self) -> int | None:
        return self._step_index

    def set_timesteps(self, num_inference_steps: int, device: Any = None, **_: Any) -> None:
        """Use the first levels.

        Raises:
            ValueError: there are fewer levels than steps.
        """
        levels = self.config.levels
        if num_inference_steps > len(levels):
            raise ValueError(
                f"num_inference_steps={num_inference_steps}: the model was distilled to "
                f"{len(levels)} steps, and has no more"
            )
        timesteps = torch.tensor(levels[:num_inference_steps])
        if self.config.rounds_timesteps:
            timesteps = timesteps.to(torch.bfloat16).float()
        self.timesteps = timesteps.to(device)
        shares = torch.tensor([*levels[:num_inference_steps], 0], dtype=torch.float32)
        self.sigmas = shares / self.config.num_train_timesteps
        self._step_index = None

    def set_begin_index(self, begin_index: int = 0) -> None:
        self._step_index = begin_index

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        return sample

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        return_dict: bool = True,
        **_: Any,
    ) -> DMDOutput | tuple[Tensor]:
        """Go from one level to the next.

        Args:
            model_output: velocity, noise minus clean sample, like `sample`.
            timestep: not read; steps follow each other.
            sample: (rows, C, F, h, w), noisy.
        """
        step = self._step_index or 0
        clean = sample.float() - self.sigmas[step] * model_output.float()
        self._step_index = step + 1
        if sigma := float(self.sigmas[step + 1]):
            noise = torch.randn(clean.shape, generator=self.generator).to(clean.device)
            clean = (1 - sigma) * clean + sigma * noise
        after = clean.to(sample.dtype)
        return DMDOutput(prev_sample=after) if return_dict else (after,)
