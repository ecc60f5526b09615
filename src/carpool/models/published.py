"""Models published as bare weight files, without the rest of their pipeline.

TurboWan's repositories have no index, only one or two denoisers as `.pth`. Such a MODEL means the
Wan pipeline with these components replaced. No torch.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from carpool.errors import LoadFailed
from carpool.models.source import index_of


@dataclass(frozen=True, slots=True)
class Published:
    """The files of a repository, and their pipeline."""

    base: str  # hub id of the pipeline with all other components
    files: dict[str, str]  # by component, without `.pth`; int8 files end in `-quant`


_EXPERTS = {"transformer": "-high", "transformer_2": "-low"}
PUBLISHED = {
    f"TurboDiffusion/Turbo{wan}-{size}": Published(
        f"Wan-AI/{wan}-Diffusers",
        {component: f"Turbo{wan}{expert}-{size}" for component, expert in experts.items()},
    )
    for wan, size, experts in (
        ("Wan2.1-T2V-1.3B", "480P", {"transformer": ""}),
        ("Wan2.1-T2V-14B", "480P", {"transformer": ""}),
        ("Wan2.1-T2V-14B", "720P", {"transformer": ""}),
        ("Wan2.2-I2V-A14B", "720P", _EXPERTS),
    )
}
SHAPES = {
    "tencent/Hunyuan3D-2": "hunyuan3d-dit-v2-0",
    "tencent/Hunyuan3D-2mini": "hunyuan3d-dit-v2-mini",
}
"""Repositories in Hunyuan3D-2's layout, with the default folder; `-VARIANT` selects others."""
SHAPE_FILES = ("config.yaml", "model.fp16.safetensors")
QUANT = "quant"
"""The variant with int8 linear layers."""

S = TypeVar("S", bound=Any)  # EngineSettings, whose module imports this one


def in_parts(model: str, settings: S) -> tuple[str, S]:
    """Convert a model and its settings to a pipeline with replaced components.

    Args:
        model: a hub id of `PUBLISHED`, or the folder of its downloaded files; other models are
            returned unchanged.

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
    """The public name of such a model; None for other models."""
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
    """The folder of a MODEL in Hunyuan3D-2's layout; for a whole repository the first such folder.

    It has `config.yaml` next to its weights, and no index.

    Args:
        variant: "turbo" or "fast": suffix of the folder in a whole repository.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir() or index_of(folder) is not None:
        return None
    suffix = f"*-{variant}" if variant else "*"
    places = [folder, *sorted(folder.glob(f"hunyuan3d-dit-{suffix}"))]
    return next((place for place in places if (place / "config.yaml").is_file()), None)


def _of_folder(folder: Path) -> Published | None:
    """Find the first entry with a file in a folder without an index."""
    if not folder.is_dir() or index_of(folder) is not None:
        return None
    files = (file.name.removesuffix(".pth") for file in folder.glob("*.pth"))
    names = {name.removesuffix(f"-{QUANT}") for name in files}
    return next((e for e in PUBLISHED.values() if names & {*e.files.values()}), None)
