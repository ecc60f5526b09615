"""Wan's pipelines for TurboWan, whose sampler starts from less than pure noise."""

from typing import Any

from diffusers import WanImageToVideoPipeline, WanPipeline


class TurboWanPipeline(WanPipeline):  # type: ignore[misc]
    """Wan's pipeline, with the sampler's share of noise in the first sample."""

    def prepare_latents(self, *args: Any, **options: Any) -> Any:
        return super().prepare_latents(*args, **options) * self.scheduler.init_noise_sigma


class TurboWanImageToVideoPipeline(WanImageToVideoPipeline):  # type: ignore[misc]
    """Wan's pipeline, with the sampler's share of noise in the first sample."""

    def prepare_latents(self, *args: Any, **options: Any) -> Any:
        latents, *condition = super().prepare_latents(*args, **options)
        return latents * self.scheduler.init_noise_sigma, *condition


PIPELINES = {WanPipeline: TurboWanPipeline, WanImageToVideoPipeline: TurboWanImageToVideoPipeline}
