"""Previews: images of a request's estimated result during denoising.

Each step of a request's own scheduler gives an estimate of the latents without noise. A small
matrix, fitted to the model's autoencoder at the first preview (`latent_colours.py`), turns these
into colours. No module runs for a preview, and images are made off the main loop.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from carpool.engine.containment import Stages
from carpool.engine.model.device import Device
from carpool.engine.model.latent_colours import colours
from carpool.types import CheckedRequest, Clock, Event

log = logging.getLogger("carpool")


@dataclass(frozen=True, slots=True)
class DenoisedEstimate:
    """A request's latents without noise, estimated by its scheduler after a step."""

    latents: Tensor  # (1, positions, channels) or (1, channels, height, width)
    layout: Any  # rows and columns of packed latents: see `SchedulerHook.note_layout`
    step: int  # denoising steps done
    steps: int


class SchedulerHook:
    """Takes estimates from the steps of one request's scheduler.

    Args:
        count: max estimates to take.
        show: called with each, on the engine's thread.
        stages: the engine's stages: a step continues without an estimate that fails.
    """

    def __init__(
        self, count: int, show: Callable[[DenoisedEstimate], None], stages: Stages
    ) -> None:
        self._count, self._show, self._stages = count, show, stages
        self._step = 0
        self._layout: Any = None

    def install(self, scheduler: Any) -> None:
        """Hook every step from now on. The scheduler must be private to the request."""
        plain, owner = type(scheduler).step, weakref.ref(scheduler)  # no cycle: it holds tensors

        @functools.wraps(plain)  # pipelines inspect its parameters `eta` and `generator`
        def step(*args: Any, **kwargs: Any) -> Any:
            scheduler = owner()
            result = plain(scheduler, *args, **kwargs)
            self._stages.contain(
                "preview", None, self._stepped, scheduler, plain, args, kwargs, result
            )
            return result

        scheduler.step = step

    def note_layout(self, arguments: Any) -> None:
        """Record the layout of packed latents, if the arguments of a denoiser's call have it.

        `img_ids` are (positions, 3) or (1, positions, 4): layer, row, column; `img_shapes` are
        [[(layers, rows, columns), ...]]. Reference images follow the image itself.
        """
        shapes, ids = arguments.get("img_shapes"), arguments.get("img_ids")
        if shapes is not None or isinstance(ids, Tensor):
            self._layout = shapes if ids is None else ids

    def _stepped(self, scheduler: Any, plain: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._step += 1
        begin = getattr(scheduler, "begin_index", None) or 0
        steps = len(scheduler.timesteps)
        if self._step in moments(self._count, steps - begin):
            bound = inspect.signature(plain).bind(scheduler, *args, **kwargs).arguments
            clean = _clean(scheduler, bound["model_output"], bound["sample"], result)
            self._show(DenoisedEstimate(clean, self._layout, begin + self._step, steps))


def moments(count: int, steps: int) -> set[int]:
    """The steps after which to take estimates: evenly spaced, never the last one."""
    return {round(i * steps / (count + 1)) for i in range(1, count + 1)} - {0, steps}


def _clean(scheduler: Any, answer: Tensor, sample: Tensor, result: Any) -> Tensor:
    """The latents without noise, estimated from the scheduler's step."""
    if type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler":  # x = (1 - s) x0 + s noise
        estimate: Tensor = sample - scheduler.sigmas[scheduler.step_index - 1] * answer
        return estimate  # the answer is noise - x0
    if isinstance(result, tuple):
        before, *estimates = result
    else:
        before = result.prev_sample
        estimates = [getattr(result, "pred_original_sample", None)]
    config = scheduler.config
    outputs = [output for output in getattr(scheduler, "model_outputs", ()) if output is not None]
    if outputs and ("++" in config.get("algorithm_type", "") or config.get("predict_x0")):
        estimates = outputs[-1:]  # multistep solvers store their estimates
    clean: Tensor = before if not estimates or estimates[0] is None else estimates[0]
    return clean


class PreviewDecoder:
    """Turns estimates of one model's latents into images."""

    def __init__(self, pipe: Any) -> None:
        self._vae = getattr(pipe, "vae", None)
        # GLM-Image's autoencoder states a factor next to the means that its pipeline does not use
        self._has_factor = "XL" in type(pipe).__name__
        self._factors: Tensor | None = None  # (channels + 1, 3): from latents to colours, 0-1
        self._scale_px = 0
        self._was_fitted = False

    def fit(self) -> bool:
        """Prepare. Returns whether this model's requests can have previews.

        On the thread that runs the model: the first time, it encodes a few small images.
        """
        if not self._was_fitted:
            self._was_fitted = True
            try:
                self._factors, self._scale_px = colours(self._vae)
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                log.warning("no previews: the autoencoder cannot be asked for colours: %s", error)
        return self._factors is not None

    def picture(
        self, estimate: DenoisedEstimate, to_host: Callable[[Tensor], Tensor]
    ) -> NDArray[np.uint8] | None:
        """Draw an estimate: (height, width, 3), in the size of the final image.

        None for latents of unknown layout.
        """
        assert self._factors is not None
        maps = _maps(to_host(estimate.latents).float(), estimate.layout, to_host)
        if maps is not None:
            maps = self._as_encoded(maps, len(self._factors) - 1)
        if maps is None:
            return None
        small = torch.einsum("chw,cr->rhw", maps, self._factors[:-1])
        small = small + self._factors[-1].view(3, 1, 1)
        large = interpolate(small[None], scale_factor=self._scale_px, mode="bicubic")[0]
        coloured = (large.clamp(0, 1) * 255).round().to(torch.uint8)
        pixels: NDArray[np.uint8] = coloured.permute(1, 2, 0).contiguous().numpy()
        return pixels

    def _as_encoded(self, maps: Tensor, channels: int) -> Tensor | None:
        """Undo the pipeline's transform of the autoencoder's latents: 2x2 patches, then scale."""
        vae: Any = self._vae
        norm, config = getattr(vae, "bn", None), vae.config
        if norm is not None and len(maps) == len(norm.running_mean):
            variance = norm.running_var.float().cpu() + getattr(config, "batch_norm_eps", 1e-5)
            maps = _affine(maps, variance.sqrt(), norm.running_mean.float().cpu())
        if len(maps) == 4 * channels:
            _, height, width = maps.shape
            patches = maps.reshape(channels, 2, 2, height, width).permute(0, 3, 1, 4, 2)
            maps = patches.reshape(channels, 2 * height, 2 * width)
        if len(maps) != channels:
            return None
        if norm is not None:
            return maps
        mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        factor = float(getattr(config, "scaling_factor", None) or 1.0)
        if mean is not None and std is not None:
            deviation = torch.tensor(std) / (factor if self._has_factor else 1.0)
            return _affine(maps, deviation, torch.tensor(mean))
        return maps / factor + float(getattr(config, "shift_factor", None) or 0.0)


def _affine(maps: Tensor, spread: Tensor, mean: Tensor) -> Tensor:
    return maps * spread.view(-1, 1, 1) + mean.view(-1, 1, 1)


def _maps(latents: Tensor, layout: Any, to_host: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Latents as (channels, rows, columns)."""
    if latents.ndim == 5 and latents.shape[2] == 1:  # a one-frame video
        latents = latents[:, :, 0]
    if len(latents) != 1:
        return None
    if latents.ndim == 4:
        return latents[0]
    if latents.ndim != 3 or layout is None:
        return None
    if isinstance(layout, Tensor):
        ids = to_host(layout).reshape(-1, layout.shape[-1])[: latents.shape[1], 1:3]
        height, width = (int(maximum) + 1 for maximum in ids.amax(dim=0))
    else:
        _, height, width = layout[0][0]
    if height * width != latents.shape[1]:
        return None
    return latents[0].T.reshape(-1, height, width)


class PreviewSender:
    """Sends `preview` events to the requests with previews.

    Args:
        off_loop: runs work on another thread.
        is_overloaded: whether previews should give way to more important work.
    """

    def __init__(
        self,
        pipe: Any,
        device: Device,
        clock: Clock,
        off_loop: Callable[[Callable[[], None]], object],
        is_overloaded: Callable[[], bool],
        stages: Stages,
    ) -> None:
        self._previews, self._device, self._clock = PreviewDecoder(pipe), device, clock
        self._off_loop, self._is_overloaded, self._stages = off_loop, is_overloaded, stages

    def hook(
        self, view: Any, request: CheckedRequest, send: Callable[[Event], None]
    ) -> SchedulerHook | None:
        """Hook the scheduler of a request with previews, if its model supports them."""
        if not (request.previews and hasattr(view, "scheduler") and self._previews.fit()):
            return None
        show = functools.partial(self._show, request.request_id, send)
        hook = SchedulerHook(request.previews, show, self._stages)
        hook.install(view.scheduler)
        return hook

    def _show(
        self, request_id: str, send: Callable[[Event], None], estimate: DenoisedEstimate
    ) -> None:
        if self._is_overloaded():
            return
        now_s, mark = self._clock(), self._device.mark()

        def draw_and_send() -> None:
            to_host = functools.partial(self._device.to_host, mark=mark)
            draw = self._previews.picture
            picture = self._stages.contain("preview", None, draw, estimate, to_host)
            if picture is not None:
                step, steps = estimate.step, estimate.steps
                send(Event("preview", request_id, now_s, step, steps, picture=picture))

        self._off_loop(draw_and_send)
