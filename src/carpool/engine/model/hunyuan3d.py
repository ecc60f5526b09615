"""Hunyuan3D-2 through its own package, `hy3dgen`: its folder layout as a diffusers pipeline.

Its package's `__call__` runs in the fiber, up to the latents of the shape. The thread of host calls
extracts the surface outside of the main loop: at the published resolution, that takes thousands of
forwards of a small decoder and more time than all steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from safetensors.torch import load_file

from carpool.engine.tokenizers import beside_loop
from carpool.errors import InvalidValue, LoadFailed, NoSurface, PipelineFailed

MODULES = ("model", "vae", "conditioner")
PARTS = (*MODULES, "scheduler", "image_processor")
_PACKAGES = {"hy3dgen.shapegen.": "hy3dgen.shapegen.", "hy3dshape.": "hy3dgen.shapegen."}
"""Allowed prefixes of classes in a configuration, and their modules in the package."""


@dataclass
class MeshOutput(BaseOutput):  # type: ignore[misc]
    """Meshes, one for each image."""

    meshes: list[Any]  # trimesh objects


class Hunyuan3DPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Creates a mesh from an image; transparent areas are not part of the shape."""

    image_mode = "RGBA"
    parts_after_steps = 50  # of the surface, as clients are told; few steps then are few per cent

    def __init__(
        self, model: Any, vae: Any, conditioner: Any, scheduler: Any, image_processor: Any
    ) -> None:
        super().__init__()
        self.register_modules(
            model=model, vae=vae, conditioner=conditioner, scheduler=scheduler,
            image_processor=image_processor,
        )  # fmt: skip

    def to(self, *args: Any, **options: Any) -> "Hunyuan3DPipeline":
        """Move and cast the modules, which do not record their device and dtype."""
        for name in MODULES:
            getattr(self, name).to(*args, **options)
        return self

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = next(self.model.parameters())
        return weight

    @torch.no_grad()
    def __call__(
        self,
        image: Any,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        generator: torch.Generator | None = None,
        box_v: float = 1.01,
        octree_resolution: int = 384,
        mc_level: float = 0.0,
        num_chunks: int = 8000,
        callback_on_step_end: Any = None,
    ) -> MeshOutput:
        from hy3dgen.shapegen import Hunyuan3DDiTFlowMatchingPipeline

        cls = Hunyuan3DDiTFlowMatchingPipeline
        pipe = cls.__new__(cls)  # its constructor would move the modules
        vars(pipe).update({name: getattr(self, name) for name in PARTS})
        vars(pipe).update(device=self._execution_device, dtype=self.dtype, kwargs={})
        call = cls.__call__.__wrapped__  # unwrapped from inference mode: modules are shared
        latents = call(
            pipe, image, num_inference_steps, guidance_scale=guidance_scale, generator=generator,
            output_type="latent", enable_pbar=False, callback_steps=1,
            callback=callback_on_step_end and partial(_at_step_end, self, callback_on_step_end),
        )  # fmt: skip
        latents = self.vae(1 / self.vae.scale_factor * latents)
        options = {
            "bounds": float(box_v), "mc_level": mc_level, "num_chunks": num_chunks,
            "octree_resolution": octree_resolution, "enable_pbar": False,
        }  # fmt: skip
        return MeshOutput(meshes=[beside_loop(partial(_surface, self.vae, latents, options))])


def _at_step_end(pipe: Any, callback: Any, step: int, timestep: Any, output: Any) -> None:
    if callback(pipe, step, timestep, {"latents": output.prev_sample}):
        rule = "its tensors cannot be changed here: must return {} or None"
        raise InvalidValue(f"callback_on_step_end: {rule}", param="callback_on_step_end")


def _surface(
    vae: Any, latents: torch.Tensor, options: Mapping[str, Any], tell: Callable[[float], None]
) -> Any:
    """Extract the mesh of a shape.

    Args:
        vae: its decoder runs for a point at a time, in chunks.
        latents: (1, tokens, width).
        options: the package's extraction options.
        tell: called with the share of the chunks that are done; what it raises ends the work.

    Raises:
        NoSurface, PipelineFailed: no surface lies in the box, or it cannot be extracted.
    """
    from hy3dgen.shapegen.pipelines import export_to_trimesh

    chunks = ceil((options["octree_resolution"] + 1) ** 3 / options["num_chunks"])
    done = count(1)

    def decoder(**arguments: Any) -> Any:
        answer = vae.geo_decoder(**arguments)
        tell(min(1.0, next(done) / chunks))
        return answer

    tell(0.0)  # it may have waited for others'
    with torch.no_grad():
        volume = vae.volume_decoder(latents, decoder, **options)
    tell(1.0)
    if not volume.min() < options["mc_level"] < volume.max():  # also of numbers that are none
        problem = f"the shape has no surface at mc_level={options['mc_level']:g}"
        raise NoSurface(f"{problem}: send another seed, or more num_inference_steps", param="seed")
    [mesh] = export_to_trimesh(vae.surface_extractor(volume, **options))
    if mesh is None:
        raise PipelineFailed("the surface of the shape cannot be extracted; the log says more")
    return mesh


def read_shapes(folder: Path, dtype: torch.dtype) -> Hunyuan3DPipeline:
    """Read a folder with `config.yaml` and `model.fp16.safetensors`.

    Raises:
        LoadFailed: the package is missing, or a file does not match.
    """
    try:
        import_module("hy3dgen.shapegen")
    except ImportError as error:
        raise LoadFailed(
            f"{folder} is Hunyuan3D-2: pip install hy3dgen, or name the python of an environment "
            f"that has it by --worker-python ({error})"
        ) from error
    config = yaml.safe_load((folder / "config.yaml").read_text())
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in load_file(_weights(folder)).items():
        part, _, key = name.partition(".")
        weights.setdefault(part, {})[key] = weight
    parts = {name: _instance(folder, name, config.get(name)) for name in PARTS}
    for name in MODULES:
        report = parts[name].load_state_dict(weights.get(name, {}), strict=False)
        if report.missing_keys and not (name == "conditioner" and name not in weights):
            raise LoadFailed(f"{folder} lacks {report.missing_keys[0]} of its {name}")
        if name != "vae" and report.unexpected_keys:  # the vae's encoder is not loaded
            raise LoadFailed(f"{folder} has {report.unexpected_keys[0]} too much in its {name}")
        parts[name].to(dtype)
    return Hunyuan3DPipeline(**parts)


def _weights(folder: Path) -> Path:
    files = [folder / name for name in ("model.fp16.safetensors", "model.safetensors")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise LoadFailed(f"{folder} has no {files[0].name}: fetch it, a .ckpt is not read")
    return file


def _instance(folder: Path, name: str, entry: Any) -> Any:
    """Create a part of the configured class, which must belong to the package."""
    target = str(entry.get("target")) if isinstance(entry, dict) else ""
    prefix = next((prefix for prefix in _PACKAGES if target.startswith(prefix)), None)
    if prefix is None:
        raise LoadFailed(f"{folder}: {name} is of {target!r}: must be of hy3dgen.shapegen")
    module, _, cls = f"{_PACKAGES[prefix]}{target.removeprefix(prefix)}".rpartition(".")
    return getattr(import_module(module), cls)(**entry.get("params", {}))
