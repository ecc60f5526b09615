"""Hunyuan3D-2 through its own package, `hy3dgen`: its folder layout as a diffusers pipeline.

Its package's `__call__` runs in the fiber, up to the latents of the shape. The surface is extracted
when its mesh is first read: by the thread that converts outputs, outside of the main loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from safetensors.torch import load_file

from carpool.errors import LoadFailed

MODULES = ("model", "vae", "conditioner")
PARTS = (*MODULES, "scheduler", "image_processor")
_PACKAGES = {"hy3dgen.shapegen.": "hy3dgen.shapegen.", "hy3dshape.": "hy3dgen.shapegen."}
"""Allowed prefixes of classes in a configuration, and their modules in the package."""


class Surface:
    """A mesh that is extracted at its first use.

    Args:
        vae: the pipeline's; its volume decoder runs for one point at a time.
        latents: (1, tokens, width).
        options: options of the package's extraction.
    """

    def __init__(self, vae: Any, latents: torch.Tensor, options: Mapping[str, Any]) -> None:
        self._vae, self._latents, self._options = vae, latents, options
        self._mesh: Any = None

    def _read(self) -> Any:
        if self._mesh is None:
            from hy3dgen.shapegen.pipelines import export_to_trimesh

            with torch.no_grad():
                outputs = self._vae.latents2mesh(self._latents, enable_pbar=False, **self._options)
            [self._mesh] = export_to_trimesh(outputs)
            if self._mesh is None:
                raise ValueError("the shape has no surface: ask for another seed, or more steps")
        return self._mesh

    @property
    def vertices(self) -> Any:
        return self._read().vertices

    @property
    def faces(self) -> Any:
        return self._read().faces


@dataclass
class MeshOutput(BaseOutput):  # type: ignore[misc]
    """Meshes, one for each image."""

    meshes: list[Surface]


class Hunyuan3DPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Creates a mesh from an image; transparent areas are not part of the shape."""

    image_mode = "RGBA"

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
    ) -> MeshOutput:
        from hy3dgen.shapegen import Hunyuan3DDiTFlowMatchingPipeline

        cls = Hunyuan3DDiTFlowMatchingPipeline
        pipe = cls.__new__(cls)  # its constructor would move the modules
        vars(pipe).update({name: getattr(self, name) for name in PARTS})
        vars(pipe).update(device=self._execution_device, dtype=self.dtype, kwargs={})
        call = cls.__call__.__wrapped__  # unwrapped from inference mode: modules are shared
        latents = call(
            pipe, image, num_inference_steps, guidance_scale=guidance_scale, generator=generator,
            output_type="latent", enable_pbar=False,
        )  # fmt: skip
        latents = self.vae(1 / self.vae.scale_factor * latents)
        options: dict[str, Any] = {"bounds": box_v, "mc_level": mc_level, "num_chunks": num_chunks}
        options |= {"octree_resolution": octree_resolution, "mc_algo": None}
        return MeshOutput(meshes=[Surface(self.vae, latents, options)])


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
