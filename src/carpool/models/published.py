"""Models that are published as files of weights alone, beside the pipeline that they were made of.

TurboWan's repositories have no index: a denoiser or two as `.pth`. Such a MODEL is the Wan pipeline
with these components from elsewhere. No torch.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from carpool.errors import LoadFailed
from carpool.models.source import index_of


@dataclass(frozen=True, slots=True)
class Published:
    """What a repository holds, and of which pipeline."""

    base: str  # hub id of the pipeline that has everything else
    files: dict[str, str]  # by component, without `.pth`; `-quant` names the int8 ones


_WAN = "Wan-AI/Wan2."
PUBLISHED = {
    "TurboDiffusion/TurboWan2.1-T2V-1.3B-480P": Published(
        f"{_WAN}1-T2V-1.3B-Diffusers", {"transformer": "TurboWan2.1-T2V-1.3B-480P"}
    ),
    "TurboDiffusion/TurboWan2.1-T2V-14B-480P": Published(
        f"{_WAN}1-T2V-14B-Diffusers", {"transformer": "TurboWan2.1-T2V-14B-480P"}
    ),
    "TurboDiffusion/TurboWan2.1-T2V-14B-720P": Published(
        f"{_WAN}1-T2V-14B-Diffusers", {"transformer": "TurboWan2.1-T2V-14B-720P"}
    ),
    "TurboDiffusion/TurboWan2.2-I2V-A14B-720P": Published(
        f"{_WAN}2-I2V-A14B-Diffusers",
        {
            "transformer": "TurboWan2.2-I2V-A14B-high-720P",
            "transformer_2": "TurboWan2.2-I2V-A14B-low-720P",
        },
    ),
}
SHAPES = {
    "tencent/Hunyuan3D-2": "hunyuan3d-dit-v2-0",
    "tencent/Hunyuan3D-2mini": "hunyuan3d-dit-v2-mini",
}
"""Repositories of Hunyuan3D-2's layout, and the folder that is taken; `-VARIANT` names others."""
SHAPE_FILES = ("config.yaml", "model.fp16.safetensors")
QUANT = "quant"
"""The variant of files whose linear layers are int8."""

S = TypeVar("S", bound=Any)  # EngineSettings; what reads them imports this room


def in_parts(model: str, settings: S) -> tuple[str, S]:
    """A model and its settings, as a pipeline with components from elsewhere.

    Args:
        model: a hub id of `PUBLISHED`, or the folder that its files were downloaded to; any other
            is given back as it is.

    Raises:
        LoadFailed: a folder lacks a file, or there is no such variant.
    """
    folder = Path(model).expanduser()
    entry = PUBLISHED.get(model) or _of_folder(folder)
    if entry is None:
        return model, settings
    if settings.variant not in (None, QUANT):
        raise LoadFailed(f"variant={settings.variant!r}: {model} has {QUANT}, or none")
    suffix = f"-{QUANT}.pth" if settings.variant else ".pth"
    replaced = {name.partition("=")[0] for name in settings.component}
    places = []
    for component, stem in entry.files.items():
        place = f"{model}/{stem}{suffix}"
        if component in replaced:
            continue
        if folder.is_dir() and not Path(place).expanduser().is_file():
            raise LoadFailed(f"{model} has no {stem}{suffix}, which is its {component}")
        places.append(f"{component}={place}")
    base = settings.model_config or entry.base
    parts = (*places, *settings.component)
    return base, replace(settings, component=parts, variant=None, model_config=None)


def name_of(model: str) -> str | None:
    """The public name of such a model; None for others."""
    if model in PUBLISHED or shapes_on_hub(model) is not None:
        return model
    folder = Path(model).expanduser()
    if shapes_in(model) is not None:
        return folder.resolve().name
    return None if _of_folder(folder) is None else folder.resolve().name


def shapes_on_hub(model: str, variant: str | None = None) -> tuple[str, str] | None:
    """Repository and folder of a hub id of `SHAPES`, or of `ID/FOLDER`; None for other models."""
    repository, folder = "/".join(model.split("/")[:2]), "/".join(model.split("/")[2:])
    if repository not in SHAPES or Path(model).expanduser().exists():
        return None
    suffix = f"-{variant}" if variant else ""
    return repository, folder or f"{SHAPES[repository]}{suffix}"


def shapes_in(model: str, variant: str | None = None) -> Path | None:
    """The folder of Hunyuan3D-2's layout that a MODEL names; of a whole repository the first one.

    It has `config.yaml` beside its weights, and no index.

    Args:
        variant: "turbo" or "fast": how the folder of a whole repository ends.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir() or index_of(folder) is not None:
        return None
    suffix = f"*-{variant}" if variant else "*"
    places = [folder, *sorted(folder.glob(f"hunyuan3d-dit-{suffix}"))]
    return next((place for place in places if (place / "config.yaml").is_file()), None)


def _of_folder(folder: Path) -> Published | None:
    """The entry whose first file lies in a folder that is no pipeline's."""
    if not folder.is_dir() or index_of(folder) is not None:
        return None
    entries = (
        entry
        for entry in PUBLISHED.values()
        for stem in entry.files.values()
        for suffix in (".pth", f"-{QUANT}.pth")
        if (folder / f"{stem}{suffix}").is_file()
    )
    return next(entries, None)
