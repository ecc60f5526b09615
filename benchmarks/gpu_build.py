"""Build a model with random weights on the device, make requests, and capture its calls.

Nothing is downloaded, and no weights are drawn on the host: `init_empty_weights` makes modules
without memory for weights (buffers are computed as usual), and `filled` draws the weights on the
device. 20 billion weights take seconds.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import carpool
from benchmarks.gpu_clock import Marks, matmul_tflops
from benchmarks.gpu_models import MODELS, Config, Model, Size
from benchmarks.gpu_tiny import tiny
from carpool import Request
from carpool.engine.intercept import Call, Interception, Target

NORMS = 1  # axes of scales and biases


@dataclass(frozen=True, slots=True)
class Rig:
    """The device of the measurements, and whether the models have real size."""

    device: torch.device
    is_tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_tiny else torch.bfloat16

    @property
    def marks(self) -> Marks:
        return Marks(self.device)

    @property
    def name(self) -> str:
        if self.device.type == "cpu":
            return "a CPU"
        named = getattr(torch.get_device_module(self.device), "get_device_name", None)
        return str(self.device if named is None else named())

    def tflops(self) -> float:
        """Measured TFLOP/s of one large matrix product."""
        return matmul_tflops(self.marks, 256 if self.is_tiny else 8192, self.dtype)

    def model(self, name: str) -> Model:
        return tiny(name) if self.is_tiny else MODELS[name]

    @contextmanager
    def built(self, name: str) -> Iterator["Built"]:
        """A model on the device; what the one before has left is released."""
        torch.compiler.reset()
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()
        model = self.model(name)
        parts = [
            filled(weightless(p), self.device, self.dtype) for p in (model.denoiser, model.vae)
        ]
        self.marks.wait()
        yield Built(model, pipeline_of(model, *parts), parts[0], self)


def rig(device: str, is_tiny: bool) -> Rig:
    """Find the device of this process.

    Raises:
        SystemExit: no such device, or the models are too large for it.
    """
    here = torch.device(device)
    if here.type == "cpu" and not is_tiny:
        raise SystemExit("models of real size want an accelerator: --tiny is a dry run on a CPU")
    if here.type != "cpu" and not torch.accelerator.is_available():
        raise SystemExit(
            f"torch {torch.__version__} finds no {here.type} here: --device cpu --tiny"
        )
    torch.set_grad_enabled(False)
    return Rig(here, is_tiny)


@dataclass(frozen=True, slots=True)
class Built:
    """A model on the device, and its requests."""

    model: Model
    pipe: Any
    denoiser: Any
    rig: Rig

    def requests(self, size: Size, count: int, steps: tuple[int, ...] = ()) -> list[Request]:
        """Requests with published guidance and alternating steps.

        Each has its own prompt; all share one negative prompt object, because `dynamic` compares it
        and would not batch them otherwise.
        """
        first = self.request(size, 1).parameters
        shared = {name: value for name, value in first.items() if name.startswith("negative_")}
        turns = enumerate(islice(cycle(steps or self.model.steps), count))
        return [self.request(size, n, seed=i, **shared) for i, n in turns]

    def request(self, size: Size, steps: int, **extra: Any) -> Request:
        return request(self.model, size, steps, self.rig.device, dtype=self.rig.dtype, **extra)

    def engine(self, **settings: Any) -> carpool.Engine:
        return carpool.load(self.pipe, device=str(self.rig.device), **settings)

    def plain(self, request: Request) -> Any:
        """The output of plain diffusers for a request."""
        generator = torch.Generator().manual_seed(request.seed or 0)
        # The parameters hold the embeddings of negative prompts.
        no_negative = {"negative_prompt": None} if self.model.has_negative else {}
        return self.pipe(**no_negative, **request.parameters, generator=generator)


def pixels(output: Any) -> Tensor:
    """The picture or clip of an output, values 0-1."""
    pictures = getattr(output, "images", None)
    return torch.as_tensor(output.frames if pictures is None else pictures).float().cpu()


def weightless(part: tuple[str, Config]) -> Any:
    """Build a diffusers module with its weights on the meta device."""
    name, config = part
    with init_empty_weights():
        return getattr(diffusers, name)(**config).eval().requires_grad_(False)


def filled(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    """Draw the weights of a module on the device, scaled so that activations stay near 1.

    Matrices and kernels get a standard deviation of 1/sqrt(inputs), biases 0, scales of norms 1;
    then the activations of a network of sixty blocks neither vanish nor explode.
    """
    generator = torch.Generator(device).manual_seed(0)
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            tensor = torch.empty(weight.shape, dtype=dtype, device=device)
            if weight.ndim > NORMS:
                tensor.normal_(std=weight[0].numel() ** -0.5, generator=generator)
            else:
                tensor.fill_(float(name != "bias"))
            setattr(part, name, nn.Parameter(tensor, requires_grad=False))
    return module.to(device)  # moves the buffers, in their own types


def pipeline_of(model: Model, denoiser: nn.Module, vae: nn.Module) -> DiffusionPipeline:
    """Build the pipeline of a denoiser and a VAE, without text encoders."""
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
    **extra: Any,
) -> Request:
    """A request for one output: random embeddings, and published guidance or one row."""
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
    parameters = {**model.extra, **guidance, **size.parameters, **texts, **extra}
    return Request(seed=seed, num_inference_steps=steps, **parameters)


class _Caught(Exception):
    """Stops a pipeline at its first call of the denoiser."""


def denoiser_call(pipe: DiffusionPipeline, model: Model, request: Request) -> Call:
    """Capture a request's first call of the denoiser, as the engine receives it.

    The pipeline runs unchanged up to this call. The denoiser itself never runs, so its weights may
    be on the meta device.
    """
    calls: list[Call] = []
    target = denoiser_of(pipe, model)

    @functools.wraps(target.original)
    def catch(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call(target, args, kwargs))
        raise _Caught

    target.module.__dict__[target.method] = catch
    try:
        pipe(**request.parameters, generator=torch.Generator().manual_seed(request.seed or 0))
    except _Caught:
        pass
    finally:
        del target.module.__dict__[target.method]
    [call] = calls
    return call


def denoiser_of(pipe: DiffusionPipeline, model: Model) -> Target:
    targets = Interception(pipe.components).targets
    return next(target for target in targets if target.component == model.component)


@torch.no_grad()
def operations(model: Model, size: Size) -> float:
    """Count the floating point operations of the denoiser's forward for one row, without running.

    Source: `torch.utils.flop_counter` on the meta device: matrix products, convolutions and
    attention; a multiplication and an addition count as two.
    """
    denoiser = weightless(model.denoiser)
    nn.Module.to(denoiser, torch.bfloat16)  # bypasses diffusers' own `to`, which warns
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
