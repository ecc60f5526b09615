"""Read components from other places than the pipeline's own files: a file, a folder or the hub."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import diffusers
import torch
import transformers
from diffusers.loaders.single_file_utils import SingleFileComponentError
from safetensors import SafetensorError
from torch import nn

from carpool.engine.model.checkpoint import SCALES, read_checkpoint, shards_of
from carpool.engine.model.conversion import Misfit
from carpool.engine.model.from_checkpoint import (
    BasePipeline,
    component_of,
    from_folder,
    gguf_encoder,
    refuse_size,
)
from carpool.engine.model.renames import CONNECTORS
from carpool.errors import LoadFailed, named
from carpool.models.damage import damage_in
from carpool.models.source import (
    PICKLES,
    SINGLE_FILES,
    class_in,
    components_of,
    hub_errors,
    hub_has,
    index_of,
    is_weights,
    reach_hub,
)
from carpool.settings.preparation import is_denoiser, is_gguf

logger = logging.getLogger(__name__)

AUTOENCODERS = (
    "AutoencoderKL", "AutoencoderTiny", "AsymmetricAutoencoderKL", "ConsistencyDecoderVAE"
)  # fmt: skip
"""Classes with compatible latents: each may replace another."""

MEMBERS = {
    diffusers.MultiControlNetModel: diffusers.ControlNetModel,
    diffusers.MultiAdapter: diffusers.T2IAdapter,
}
"""Classes whose members have folders of their own: `controlnet`, `controlnet_1`, ..."""

LIBRARIES_RAISE = (
    OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError, AttributeError,
    SafetensorError, SingleFileComponentError,
)  # fmt: skip
"""Exceptions of the libraries for unreadable files."""


def class_of(library: str, name: str) -> Any:
    """The class of a component; None if no library has it.

    Args:
        library: diffusers, transformers, or a diffusers pipeline with its own parts.
    """
    module = {"diffusers": diffusers, "transformers": transformers}.get(library)
    return getattr(module or getattr(diffusers.pipelines, library, None), name, None)


def modules_of(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The library and class name of each module in a pipeline's index."""
    modules = {}
    for name, entry in index.items():
        if (kind := class_in(entry)) is not None:
            cls = class_of(*kind)
            if cls is not None and isinstance(cls, type) and issubclass(cls, nn.Module):
                modules[name] = kind
    return modules


def read_component(
    name: str,
    where: str,
    cls: Any,
    base: BasePipeline,
    *,
    dtype: torch.dtype,
    quantization: Any = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Read a component from another place than the pipeline's own files.

    Args:
        where: a file of weights (local, or `org/name/path` on the hub), or the folder or hub id of
            a component or of a pipeline with such a component.
        cls: class of the component in the pipeline.
        base: the pipeline; it has the component's configuration.

    Returns:
        The component; and the file's marks about the model's training.

    Raises:
        LoadFailed: it does not exist, does not fit, or is of another class.
    """
    with reading(where, f"component {name}={where}"):
        if cls in MEMBERS:
            raise ValueError(f"{name} is several models: replace their folders in {base.source}")
        if not is_weights(where):
            return _from_folder(name, where, cls, base, dtype, quantization), {}
        files = [local_file(shard) for shard in shards_of(where)]
        if is_gguf(where) and issubclass(cls, transformers.PreTrainedModel):
            return gguf_encoder(files[0], cls, base, name, dtype), {}
        checkpoint = read_checkpoint(files, dtype)
        if is_denoiser(name) and any(map(CONNECTORS.match, checkpoint.weights)):
            logger.warning("%s has connectors, too: --component connectors=%s takes them",
                           where, where)  # fmt: skip
        module = component_of(checkpoint, name, cls, base, dtype, quantization)
        refuse_size(module, name, cls, base)  # a file may have a configuration beside it
        return module, checkpoint.marks


def read_own(
    name: str, cls: Any, source: str, variant: str | None, dtype: torch.dtype, quantization: Any
) -> nn.Module | None:
    """Read a component of a pipeline's own folder; None if it does not exist.

    Args:
        variant: variant of the weights, if such files exist.

    Raises:
        LoadFailed: there are no weights, or some are missing or left over.
    """
    folder = Path(source) / name
    if not (folder / "config.json").is_file():
        return None
    if (member := MEMBERS.get(cls)) is not None:
        names = (f"{name}_{number}" if number else name for number in count())
        members = (read_own(n, member, source, variant, dtype, quantization) for n in names)
        module: nn.Module = cls(list(takewhile(lambda read: read is not None, members)))
        return module
    if not any(folder.glob("*.safetensors")):
        raise LoadFailed(
            f"{source} has no weights of {name} as .safetensors: say --component {name}=FILE"
        )
    has_variant = variant is not None and any(folder.glob(f"*.{variant}*.safetensors"))
    options = {"variant": variant} if has_variant else {}
    options |= {} if quantization is None else {"quantization_config": quantization}
    try:
        return from_folder(cls, source, subfolder=name, dtype=dtype, **options)
    except Misfit as error:
        is_scaled = any(suffix in str(error) for suffix in SCALES)
        hint = f" (--component {name}=FILE reads scaled float8)" if is_scaled else ""
        raise LoadFailed(f"{name} of {source} cannot be read: {error}{hint}") from error


@contextmanager
def reading(file: str, subject: str = "") -> Iterator[None]:
    """Turn a library's exception into a one-line error about the file, or the subject.

    Raises:
        LoadFailed: a library raised.
    """
    try:
        yield
    except LIBRARIES_RAISE as error:
        place = Path(file).expanduser()
        why = (damage_in(place) if place.is_file() else None) or str(error).strip() or named(error)
        if isinstance(error, ModuleNotFoundError):
            why = f"it needs {error.name}: pip install {error.name}"
        raise LoadFailed(f"{subject or file} cannot be read: {why.splitlines()[0]}") from error


def local_file(where: str) -> Path:
    """The path of a local file, or of a fetched one, named `org/name/path` on the hub."""
    file = Path(where).expanduser()
    if file.is_file():
        return file
    if where.startswith((".", "/", "~")) or where.count("/") < 2:
        raise FileNotFoundError(f"there is no such file: {where}")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    org, name, path = where.split("/", 2)
    if isinstance(cached := try_to_load_from_cache(f"{org}/{name}", path), str):
        return Path(cached)
    with hub_errors(f"{org}/{name}", None, path):
        reach_hub()
        return Path(hf_hub_download(f"{org}/{name}", path))


def _from_folder(
    name: str, where: str, cls: Any, base: BasePipeline, dtype: torch.dtype, quantization: Any
) -> nn.Module:
    folder = Path(where).expanduser()
    is_local = folder.is_dir()
    place = str(folder) if is_local else where
    if folder.suffix in PICKLES and folder.is_file():
        raise ValueError("it may hold a pickle, which can run code: take a .safetensors")
    if folder.name.endswith(".index.json") and folder.is_file():
        raise ValueError("it is the index of several files: name one of them, or their folder")
    if folder.is_file():
        raise ValueError(f"its name must end in {' or '.join(SINGLE_FILES)}")
    if is_local and index_of(folder) is not None and not (folder / name).is_dir():
        has = ", ".join(components_of(str(folder)))
        raise ValueError(f"it is a pipeline that has no {name}, but {has}: name a folder in it")
    if not is_local and (where.startswith((".", "/", "~")) or where.count("/") != 1):
        raise FileNotFoundError("there is no such folder, and it is no hub id like 'org/name'")
    inner = {"subfolder": name}
    if is_local:
        inner = {"subfolder": name} if (folder / name / "config.json").is_file() else {}
    elif not hub_has(where, f"{name}/config.json"):
        inner = {}
    if not issubclass(cls, transformers.PreTrainedModel):
        cls = _class_in_folder(name, cls, place, inner, base)
    options = {} if quantization is None else {"quantization_config": quantization}
    module = from_folder(cls, place, dtype=dtype, **inner, **options)
    refuse_size(module, name, cls, base)
    return module


def _class_in_folder(
    name: str, cls: Any, place: str, inner: Mapping[str, str], base: BasePipeline
) -> Any:
    """The class in a folder's configuration, if it may replace the pipeline's class.

    Raises:
        ValueError: it is unknown or incompatible.
    """
    own_name = cls.load_config(place, **inner).get("_class_name")
    if own_name in (None, cls.__name__):  # possibly a class of one pipeline only
        return cls
    actual = class_of("diffusers", str(own_name))
    if actual is None:
        raise ValueError(f"diffusers has no class {own_name!r}")
    allowed = (cls, *_annotated(base.pipeline, name))
    is_twin = {actual.__name__, cls.__name__} <= set(AUTOENCODERS)
    if not is_twin and not any(issubclass(actual, c) or issubclass(c, actual) for c in allowed):
        raise ValueError(f"it is a {actual.__name__}, and {name} of this model is a {cls.__name__}")
    return actual


def _annotated(pipeline: Any, name: str) -> list[type]:
    """The module classes that a pipeline's signature allows for a component."""
    if pipeline is None:
        return []
    try:
        hint = get_type_hints(pipeline.__init__).get(name)
    except (NameError, TypeError):  # a name imported for type checkers only
        return []
    options = get_args(hint) or (hint,)
    bases = (nn.Module, diffusers.ModelMixin)
    return [
        option
        for option in options
        if isinstance(option, type) and issubclass(option, nn.Module) and option not in bases
    ]
