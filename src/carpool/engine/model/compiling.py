"""Compile the repeated blocks of denoisers, and warm up: run every graph before the first request.

Graphs are compiled for one row and many, one text length and many, with and without masks.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from diffusers import ModularPipeline
from diffusers.image_processor import VaeImageProcessor
from torch import nn
from tqdm.auto import tqdm

from carpool.config import EngineSettings
from carpool.engine.model.device import Device
from carpool.engine.model.modular import Pipeline, workflows
from carpool.errors import LoadFailed, SettingRejected, named
from carpool.settings.preparation import DEFAULT_SIZE, is_denoiser, sizes

log = logging.getLogger("carpool")

GRAPHS = 64  # max graphs of one block
COMPILER = "inductor"  # back end of torch.compile
STEPS = 2  # a scheduler's first step may differ from the others
SHORT, LONG = "a cat", "an astronaut who rides a horse over the moon in the rain"
# masks come with two lengths and two widths, too: after two sizes, torch makes a graph for all
PROMPTS = ((SHORT,), (LONG,), (LONG, LONG), (SHORT, LONG), (SHORT, SHORT, "a cat on the moon"))
PICTURE_PX = 512  # side of the input image for pipelines that need one, if no size is set


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of a denoiser that are worth compiling: classes with several instances.

    Diffusers names them for most classes (`_repeated_blocks`); else they are the entries of lists.
    """
    if names := getattr(module, "_repeated_blocks", None):
        return [part for part in module.modules() if type(part).__name__ in names]
    lists = (part for part in module.children() if isinstance(part, nn.ModuleList))
    return [block for blocks in lists for block in blocks]


def compile_blocks(modules: Mapping[str, nn.Module], undo: ExitStack) -> None:
    blocks = [
        block
        for name, module in modules.items()
        if is_denoiser(name)
        for block in repeated_blocks(module)
    ]
    if not blocks:
        raise SettingRejected("compile: the model has no repeated blocks: leave it out")
    keep_device_guard()
    limits = torch._dynamo.config  # graphs of one block: sizes, lengths, masks; then eager for good
    undo.callback(setattr, limits, "recompile_limit", limits.recompile_limit)
    limits.recompile_limit = max(GRAPHS, limits.recompile_limit)
    # adapters add hooks later: without guards, compiled blocks would never see them
    undo.callback(setattr, limits, "skip_nnmodule_hook_guards", limits.skip_nnmodule_hook_guards)
    limits.skip_nnmodule_hook_guards = False
    for block in blocks:
        undo.callback(setattr, block, "_compiled_call_impl", block._compiled_call_impl)
        block.compile(backend=COMPILER)


@cache
def keep_device_guard() -> None:
    """Keep torch's guard of a missing CUDA device alive as long as the process.

    A CUDA build of torch on a machine without a driver creates that guard at the first compilation,
    in memory of the calling thread. Torch 2.11 uses it after the end of this thread, which may be
    the warm-up's: a segmentation fault. So a thread that never ends creates it.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is None or torch.version.cuda is None or torch.cuda.is_available():
        return
    is_made, is_over = threading.Event(), threading.Event()

    def make() -> None:
        ensure()
        is_made.set()
        is_over.wait()

    threading.Thread(target=make, name="carpool-device-guard", daemon=True).start()
    is_made.wait()


def warm_up(pipe: Pipeline, settings: EngineSettings, device: Device) -> None:
    """Run the pipeline once for every size and width, under the settings of the engine's thread.

    Compiled graphs are valid for threads with equal settings (number of threads, gradients off), so
    a separate thread runs them.

    Raises:
        LoadFailed: a run failed; for `compile` alone, only if torch raised it.
    """
    image_sizes = sizes(settings.warmup) or ([DEFAULT_SIZE] if settings.compile else [])
    if not image_sizes:
        return
    failed: list[BaseException] = []
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    parameters = sum(weight.numel() for module in modules for weight in module.parameters())
    bars = getattr(pipe, "_progress_bar_config", {})

    def run() -> None:
        device.enter(parameters)
        torch.set_grad_enabled(False)
        try:
            pipe.set_progress_bar_config(disable=True)
            for call in tqdm(list(_calls(pipe, image_sizes)), desc="Warming up", unit="run"):
                call()
        except Exception as error:  # a pipeline may raise anything
            failed.append(error)
        finally:
            pipe.set_progress_bar_config(**bars)

    thread = threading.Thread(target=run, name="carpool-warm-up", daemon=True)
    thread.start()
    thread.join()
    if failed and not settings.warmup and not isinstance(failed[0], RuntimeError):  # torch's
        log.warning(
            "the warm-up ended early, so requests compile what is left: %s", named(failed[0])
        )
    elif failed:
        raise LoadFailed(f"the warm-up failed: {named(failed[0])}") from failed[0]


def _calls(pipe: Pipeline, image_sizes: list[tuple[int, int]]) -> Iterator[partial[Any]]:
    takes = _inputs(pipe)
    needs_picture = takes.get("image", False)
    for width_px, height_px in image_sizes:
        size = {"width": width_px, "height": height_px} if width_px else {}
        for prompts in PROMPTS:
            if needs_picture and len(prompts) > 1:
                continue  # not every such pipeline takes several prompts
            arguments = {
                "prompt": list(prompts) if len(prompts) > 1 else prompts[0],
                "num_inference_steps": STEPS,
                "output_type": "pt",
                "generator": torch.Generator().manual_seed(0),
                **size,
            }
            if needs_picture:
                shape = 1, height_px or PICTURE_PX, width_px or PICTURE_PX, 3
                arguments["image"] = VaeImageProcessor.numpy_to_pil(np.full(shape, 0.5))[0]
            yield partial(pipe, **{name: arguments[name] for name in arguments if name in takes})


def _inputs(pipe: Pipeline) -> dict[str, bool]:
    """The parameters of a call, by name: whether each is required."""
    if isinstance(pipe, ModularPipeline):
        inputs = next(iter(workflows(pipe).values()))
        return {parameter.name: parameter.required for parameter in inputs}
    parameters = signature(pipe.__call__).parameters.values()
    return {parameter.name: parameter.default is Parameter.empty for parameter in parameters}
