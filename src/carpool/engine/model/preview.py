"""Pictures of what a request is going to be, made while it is still being denoised.

A request's scheduler is its own, and is given what guidance made of the denoiser's answers. So
its steps are watched: each says what the latents would be if all noise went now. Those become
colours by one small matrix, which is fitted to the model's own autoencoder when a preview is
first asked for. No module runs for a preview, and pictures are made off the loop.

Source: the linear map, "Decoding latents to RGB without upscaling", Hugging Face forum, 2022,
discuss.huggingface.co/t/decoding-latents-to-rgb-without-upscaling/23204. The fit is ours.
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
from torch.nn.functional import avg_pool2d, interpolate

log = logging.getLogger("carpool")

CELLS = 16  # places a side of the pictures that the colours are fitted to
MOST_SCALE = 64  # pixels a side that a place may stand for


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What a request's latents would be without noise, as its scheduler holds them."""

    latents: Tensor  # (1, places, channels) or (1, channels, height, width)
    places: Any  # where packed ones lie: see `Watch.saw`
    step: int  # denoising steps done
    steps: int


class Watch:
    """Looks over the shoulder of one request's scheduler."""

    def __init__(self, wanted: int, tell: Callable[[Glimpse], None]) -> None:
        self._wanted, self._tell = wanted, tell
        self._done = 0
        self._places: Any = None

    def over(self, scheduler: Any) -> None:
        """Watch every step from now on. The scheduler must be the request's own."""
        plain, owner = type(scheduler).step, weakref.ref(scheduler)  # no cycle: it holds tensors

        @functools.wraps(plain)  # pipelines ask whether it takes `eta` or a generator
        def step(*args: Any, **kwargs: Any) -> Any:
            scheduler = owner()
            result = plain(scheduler, *args, **kwargs)
            self._stepped(scheduler, plain, args, kwargs, result)
            return result

        scheduler.step = step

    def saw(self, arguments: Any) -> None:
        """Note where the latents of a denoiser's call lie, if it says so.

        `img_ids` are (places, 3) or (1, places, 4): layer, row, column; `img_shapes` are
        [[(layers, rows, columns), ...]]. References follow after the picture itself.
        """
        shapes, ids = arguments.get("img_shapes"), arguments.get("img_ids")
        if shapes is not None or isinstance(ids, Tensor):
            self._places = shapes if ids is None else ids

    def _stepped(self, scheduler: Any, plain: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._done += 1
        begin = getattr(scheduler, "begin_index", None) or 0
        steps = len(scheduler.timesteps)
        if self._done in moments(self._wanted, steps - begin):
            given = inspect.signature(plain).bind(scheduler, *args, **kwargs).arguments
            clean = _clean(scheduler, given["model_output"], given["sample"], result)
            self._tell(Glimpse(clean, self._places, begin + self._done, steps))


def moments(wanted: int, steps: int) -> set[int]:
    """After which steps to look: evenly spaced, and never after the last."""
    return {round(i * steps / (wanted + 1)) for i in range(1, wanted + 1)} - {0, steps}


def _clean(scheduler: Any, answer: Tensor, sample: Tensor, result: Any) -> Tensor:
    """What is left if all noise went now, as far as the scheduler lets one know."""
    if type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler":  # x = (1 - s) x0 + s noise
        flown: Tensor = sample - scheduler.sigmas[scheduler.step_index - 1] * answer
        return flown  # the answer is noise - x0
    if isinstance(result, tuple):
        before, *told = result
    else:
        before = result.prev_sample
        told = [getattr(result, "pred_original_sample", None)]
    config = scheduler.config
    kept = [one for one in getattr(scheduler, "model_outputs", ()) if one is not None]
    if kept and ("++" in config.get("algorithm_type", "") or config.get("predict_x0")):
        told = kept[-1:]  # multistep solvers keep their estimates of it
    clean: Tensor = before if not told or told[0] is None else told[0]
    return clean


class Previews:
    """Turns glimpses of one model into pictures."""

    def __init__(self, pipe: Any) -> None:
        self._vae = getattr(pipe, "vae", None)
        # GLM-Image's autoencoder states a factor that its pipeline does not use beside the means
        self._has_factor = "XL" in type(pipe).__name__
        self._factors: Tensor | None = None  # (channels + 1, 3): from latents to colours, 0-1
        self._scale_px = 0
        self._was_fitted = False

    def fit(self) -> bool:
        """Be ready; says whether this model's requests can have previews.

        On the thread that runs the model: the first time, it encodes a few small pictures.
        """
        if not self._was_fitted:
            self._was_fitted = True
            try:
                self._factors, self._scale_px = colours(self._vae)
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                log.warning("no previews: the autoencoder cannot be asked for colours: %s", error)
        return self._factors is not None

    def picture(
        self, glimpse: Glimpse, to_host: Callable[[Tensor], Tensor]
    ) -> NDArray[np.uint8] | None:
        """Draw a glimpse: (height, width, 3), as large as the picture is going to be.

        None for latents of a layout that is not known.
        """
        assert self._factors is not None
        maps = _maps(to_host(glimpse.latents).float(), glimpse.places, to_host)
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
        """Undo what the pipeline does to what the autoencoder gives: patches of 2x2, then scale."""
        vae: Any = self._vae
        norm, config = getattr(vae, "bn", None), vae.config
        if norm is not None and len(maps) == len(norm.running_mean):
            variance, epsilon = (
                norm.running_var.float().cpu(),
                getattr(config, "batch_norm_eps", 1e-5),
            )
            maps = _affine(maps, (variance + epsilon).sqrt(), norm.running_mean.float().cpu())
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
            own = torch.tensor(std) / (factor if self._has_factor else 1.0)
            return _affine(maps, own, torch.tensor(mean))
        return maps / factor + float(getattr(config, "shift_factor", None) or 0.0)


def _affine(maps: Tensor, spread: Tensor, mean: Tensor) -> Tensor:
    return maps * spread.view(-1, 1, 1) + mean.view(-1, 1, 1)


def _maps(latents: Tensor, places: Any, to_host: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Latents as (channels, rows, columns)."""
    if latents.ndim == 5 and latents.shape[2] == 1:  # a video of one frame
        latents = latents[:, :, 0]
    if len(latents) != 1:
        return None
    if latents.ndim == 4:
        return latents[0]
    if latents.ndim != 3 or places is None:
        return None
    if isinstance(places, Tensor):
        ids = to_host(places).reshape(-1, places.shape[-1])[: latents.shape[1], 1:3]
        height, width = (int(most) + 1 for most in ids.amax(dim=0))
    else:
        _, height, width = places[0][0]
    if height * width != latents.shape[1]:
        return None
    return latents[0].T.reshape(-1, height, width)


def colours(vae: Any) -> tuple[Tensor, int]:
    """Fit a linear map from an autoencoder's latents to the colours that they stand for.

    Returns:
        It, as (channels + 1, 3), the last row being what is added; and the pixels along a side
        that one place stands for.

    Raises:
        AttributeError, TypeError, RuntimeError: it encodes no pictures, or in another way.
    """
    weight = next(vae.parameters())
    probe_px = 2 * MOST_SCALE
    scale = probe_px // _encoded(vae, torch.zeros(1, 3, probe_px, probe_px).to(weight)).shape[-1]
    pictures = _patterns(CELLS * scale)
    latents = _encoded(vae, pictures.to(weight)).float().cpu()
    known = latents.movedim(1, -1).flatten(0, 2)
    known = torch.cat([known, torch.ones(len(known), 1)], dim=1)
    wanted = (avg_pool2d(pictures, scale) + 1) / 2
    answer = torch.linalg.lstsq(known, wanted.movedim(1, -1).flatten(0, 2), driver="gelsd")
    factors: Tensor = answer.solution
    return factors, scale


def _encoded(vae: Any, pictures: Tensor) -> Tensor:
    """Latents (pictures, channels, rows, columns), without noise."""
    is_of_videos = any(weight.ndim == 5 for weight in vae.parameters())
    answer = vae.encode(pictures.unsqueeze(2) if is_of_videos else pictures)
    latents = answer.latent_dist.mode() if hasattr(answer, "latent_dist") else answer.latent
    found: Tensor = latents[:, :, 0] if is_of_videos else latents
    return found


def _patterns(side_px: int) -> Tensor:
    """Pictures (4, 3, side, side), -1 to 1, of nine large squares each: flat, with hard edges."""
    seeded = torch.Generator().manual_seed(0)
    small = torch.rand(4, 3, 3, 3, generator=seeded) * 2 - 1
    return interpolate(small, size=(side_px, side_px), mode="nearest")
