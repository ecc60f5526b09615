"""Build a model with random weights where they are to run, ask for it, and catch what it calls.

Nothing is downloaded and nothing is drawn on the host: `init_empty_weights` makes modules whose
weights take no memory (their tables, which are no weights, are computed as ever), and `filled`
draws the weights on the device. 20 billion of them take seconds.
"""

import functools
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_models import Config, Model, Size
from carpool import Request
from carpool.engine.intercept import Call, Interception, Target

NORMS = 1  # axes of a weight that scales, and of biases


def weightless(part: tuple[str, Config]) -> Any:
    """A module of diffusers with its weights on the meta device."""
    name, config = part
    with init_empty_weights():
        return getattr(diffusers, name)(**config).eval().requires_grad_(False)


def filled(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    """Draw a weightless module's weights on the device, each so that its signals stay near one.

    Matrices and kernels get a standard deviation of 1/sqrt(inputs), biases 0, scales of norms 1;
    the gates of a network of sixty blocks then neither die out nor explode.
    """
    generator = torch.Generator(device).manual_seed(0)
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            drawn = torch.empty(weight.shape, dtype=dtype, device=device)
            if weight.ndim > NORMS:
                drawn.normal_(std=weight[0].numel() ** -0.5, generator=generator)
            else:
                drawn.fill_(float(name != "bias"))
            setattr(part, name, nn.Parameter(drawn, requires_grad=False))
    return module.to(device)  # the tables, in their own types


def pipeline_of(model: Model, denoiser: nn.Module, vae: nn.Module) -> DiffusionPipeline:
    """The pipeline around a denoiser and a VAE, without text encoders."""
    cls = getattr(diffusers, model.pipeline)
    scheduler, config = model.scheduler
    parts = {
        model.component: denoiser,
        "vae": vae,
        "scheduler": getattr(diffusers, scheduler)(**config),
    }
    expected = [name for name in cls._get_signature_keys(cls)[0] if name not in parts]
    pipe: DiffusionPipeline = cls(**dict.fromkeys(expected), **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def request(
    model: Model,
    size: Size,
    steps: int,
    device: torch.device,
    *,
    seed: int = 0,
    is_guided: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Request:
    """A request for one output: random embeddings, and guidance as published or with one row."""
    generator = torch.Generator(device).manual_seed(seed)
    texts: dict[str, Tensor | list[Tensor]] = {}
    for prefix in ("", "negative_") if is_guided and model.has_negative else ("",):
        for name, shape in model.texts.items():
            if "mask" in name:
                value = torch.ones(shape, dtype=torch.int64, device=device)
            else:
                value = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            texts[prefix + name] = [value] if model.is_listed else value
    guidance = model.guided if is_guided else model.alone
    parameters = {**model.extra, **guidance, **size.parameters, **texts, **more}
    return Request(seed=seed, num_inference_steps=steps, **parameters)


class _Caught(Exception):
    """Ends a pipeline's call once the denoiser has been called."""


def denoiser_call(pipe: DiffusionPipeline, model: Model, one: Request) -> Call:
    """The first call that a request makes of the denoiser, as the engine would see it.

    The pipeline runs as it is up to there. A denoiser whose weights are on the meta device is
    called like any other: it never runs.
    """
    caught: list[Call] = []
    target = denoiser_of(pipe, model)

    @functools.wraps(target.original)
    def catch(*args: Any, **kwargs: Any) -> Any:
        caught.append(Call(target, args, kwargs))
        raise _Caught

    target.module.__dict__[target.method] = catch
    try:
        pipe(**one.parameters, generator=torch.Generator().manual_seed(one.seed or 0))
    except _Caught:
        pass
    finally:
        del target.module.__dict__[target.method]
    [call] = caught
    return call


def denoiser_of(pipe: DiffusionPipeline, model: Model) -> Target:
    targets = Interception(pipe.components).targets
    return next(one for one in targets if one.component == model.component)


@torch.no_grad()
def operations(model: Model, size: Size) -> float:
    """Floating point operations of one forward of the denoiser for one row: counted, not run.

    Source: `torch.utils.flop_counter`, over the meta device; matrix products, convolutions and
    attention, a multiplication and an addition as two.
    """
    denoiser = weightless(model.denoiser)
    nn.Module.to(denoiser, torch.bfloat16)  # past diffusers' own `to`, which warns
    pipe = pipeline_of(model, denoiser, weightless(model.vae))
    host = torch.device("cpu")
    pins = {"_execution_device": host, "__module__": type(pipe).__module__}
    pipe.__class__ = type(type(pipe).__name__, (type(pipe),), pins)
    call = denoiser_call(pipe, model, request(model, size, 2, host, is_guided=False))
    args, kwargs = tree_map(_without_content, (call.args, dict(call.kwargs)))
    denoiser.to("meta")
    with FlopCounterMode(display=False) as counter:
        denoiser(*args, **kwargs)
    return float(counter.get_total_flops())


def _without_content(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value
