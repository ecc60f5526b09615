"""Read single files and other components: what people download and use in the place of a part."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, GGUFQuantizationConfig
from diffusers.loaders.single_file_utils import fetch_diffusers_config
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from carpool.errors import LoadFailed
from carpool.models.source import (
    SINGLE_FILES,
    check_hub,
    class_in,
    find,
    hub_errors,
    hub_has,
    reach_hub,
)

_OF_WHOLE_MODELS = ("first_stage_model.", "vae.", "cond_stage_model.", "conditioner.", "text_enc")
"""How names of weights begin in files that hold more than a denoiser."""


def class_of(library: str, name: str) -> Any:
    """The class of a component; None where neither library has it.

    Args:
        library: diffusers, transformers, or one of diffusers' pipelines that has parts of its own.
    """
    module = {"diffusers": diffusers, "transformers": transformers}.get(library)
    return getattr(module or getattr(diffusers.pipelines, library, None), name, None)


def modules_of(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Of a pipeline's index: library and class name of each component that is a module."""
    found = {}
    for name, entry in index.items():
        if (said := class_in(entry)) is not None:
            cls = class_of(*said)
            if cls is not None and isinstance(cls, type) and issubclass(cls, nn.Module):
                found[name] = said
    return found


def read_component(
    name: str,
    where: str,
    kind: tuple[str, str],
    source: str,
    *,
    dtype: torch.dtype,
    quantization: Any = None,
    revision: str | None = None,
) -> nn.Module:
    """Read a component from somewhere else than the pipeline's own files.

    Args:
        where: a .safetensors or .gguf file (local, or `org/name/path` on the hub), or the folder or
            hub id of a component or of a pipeline that has one of this name.
        kind: library and class of the component in the pipeline.
        source: folder or hub id of the pipeline: it has the component's configuration.

    Raises:
        LoadFailed: it is not there, does not fit, or is of another class.
    """
    try:
        if where.endswith(SINGLE_FILES):
            file = _local(where)
            if kind[0] == "transformers":
                return _encoder(name, file, class_of(*kind), source, dtype, quantization)
            return _single(name, file, class_of(*kind), source, dtype, revision)
        return _from_folder(name, where, kind, dtype, quantization)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise LoadFailed(f"component {name}={where} cannot be read: {lines[0]}") from error
    except (AttributeError, IndexError, SafetensorError) as error:
        raise LoadFailed(f"component {name}={where} cannot be read: {error}") from error


def _local(where: str) -> Path:
    """A file here; fetched, if it is named as `org/name/path` of the hub."""
    file = Path(where).expanduser()
    if file.is_file():
        return file
    if where.startswith((".", "/", "~")) or where.count("/") < 2:
        raise FileNotFoundError("there is no such file")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    org, name, path = where.split("/", 2)
    if isinstance(cached := try_to_load_from_cache(f"{org}/{name}", path), str):
        return Path(cached)
    with hub_errors(f"{org}/{name}", None, path):
        reach_hub()
        return Path(hf_hub_download(f"{org}/{name}", path))


def _single(
    name: str,
    file: Path,
    cls: Any,
    source: str,
    dtype: torch.dtype,
    revision: str | None,
) -> nn.Module:
    given: dict[str, Any] = {"dtype": dtype}
    if file.suffix == ".gguf":
        given["quantization_config"] = GGUFQuantizationConfig(compute_dtype=dtype)
    if not hasattr(cls, "from_single_file"):
        rule = "cannot be read from a single file: give its folder"
        raise ValueError(f"a {cls.__name__} {rule}")
    if revision is not None and not Path(source).is_dir():
        given["revision"] = revision
    module: nn.Module = cls.from_single_file(str(file), config=source, subfolder=name, **given)
    if left := [path for path, one in module.named_parameters() if one.is_meta]:
        raise ValueError(f"the file lacks {left[0]} and {len(left) - 1} other weights")
    return module


def _encoder(
    name: str, file: Path, cls: Any, source: str, dtype: torch.dtype, quantization: Any
) -> nn.Module:
    """A text encoder from one file, by the configuration that the pipeline has for it."""
    if file.suffix == ".gguf":  # the weights become plain ones: transformers does not keep them
        found: nn.Module = cls.from_pretrained(str(file.parent), gguf_file=file.name, dtype=dtype)
        return found
    config = cls.config_class.from_pretrained(source, subfolder=name)
    given = {} if quantization is None else {"quantization_config": quantization}
    module, told = cls.from_pretrained(
        None,
        config=config,
        state_dict=load_file(file),
        dtype=dtype,
        output_loading_info=True,
        **given,
    )
    if missing := sorted(told["missing_keys"]):
        raise ValueError(f"the file lacks {missing[0]} and {len(missing) - 1} other weights")
    result: nn.Module = module
    return result


def _from_folder(
    name: str, where: str, kind: tuple[str, str], dtype: torch.dtype, quantization: Any
) -> nn.Module:
    folder = Path(where).expanduser()
    is_local = folder.is_dir()
    place = str(folder) if is_local else where
    if not is_local and (where.startswith((".", "/", "~")) or where.count("/") != 1):
        raise FileNotFoundError("there is no such folder, and it is no hub id like 'org/name'")
    inner = {"subfolder": name}
    if is_local:
        inner = {"subfolder": name} if (folder / name / "config.json").is_file() else {}
    elif not hub_has(where, f"{name}/config.json"):
        inner = {}
    cls = class_of(*kind)
    if kind[0] == "diffusers":  # an AutoencoderTiny in the place of an AutoencoderKL
        own = cls.load_config(place, **inner).get("_class_name")
        cls = class_of("diffusers", str(own)) if own else cls
        if cls is None:
            raise ValueError(f"diffusers has no class {own!r}")
    given = {} if quantization is None else {"quantization_config": quantization}
    found: nn.Module = cls.from_pretrained(
        place, dtype=dtype, use_safetensors=True, **inner, **given
    )
    return found


# A model that is one file


def config_of(file: str) -> str:
    """The hub id that has the configuration of a model of one file, as diffusers infers it.

    Raises:
        LoadFailed: the file cannot be read.
    """
    try:
        return str(fetch_diffusers_config(weights_of(file))["pretrained_model_name_or_path"])
    except (KeyError, IndexError, AttributeError) as error:
        raise LoadFailed(
            f"{file} is of no model that diffusers knows: give --model-config"
        ) from error


def weights_of(file: str) -> dict[str, torch.Tensor]:
    """Names and shapes of the weights in a file, as tensors without memory.

    Raises:
        LoadFailed: the file cannot be read.
    """
    try:
        if file.endswith(".gguf"):
            from gguf import GGUFReader

            shapes = {one.name: one.shape.tolist()[::-1] for one in GGUFReader(file).tensors}
        else:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                shapes = {name: opened.get_slice(name).get_shape() for name in names}
    except ImportError as error:
        raise LoadFailed(f"{file}: needs gguf: pip install gguf") from error
    except (OSError, ValueError, SafetensorError, IndexError) as error:
        raise LoadFailed(f"{file} cannot be read: {error}") from error
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def single_file(
    file: str, config: str | None, revision: str | None
) -> tuple[str, dict[str, Any], str | None]:
    """How to read a model that is one file.

    Args:
        config: folder or hub id that has everything but the file's weights; None: inferred.

    Returns:
        The folder or hub id of the configuration; its index; and the component that the file
        holds, or None where it holds the whole model.

    Raises:
        LoadFailed: the configuration is not to be had.
    """
    names = weights_of(file)
    told = (
        ""
        if config
        else f"the configuration of {file} was inferred; --model-config gives another: "
    )
    try:
        source, extra = find(config or config_of(file))
        if not extra:
            check_hub(source, revision)
        index = dict(DiffusionPipeline.load_config(source))
    except (LoadFailed, OSError, ValueError) as error:
        raise LoadFailed(f"{told}{error}") from error
    if any(name.startswith(_OF_WHOLE_MODELS) for name in names):
        return source, index, None
    denoisers = [name for name in ("transformer", "unet") if index.get(name, [None])[0]]
    if not denoisers:
        raise LoadFailed(f"{source} has neither a transformer nor a UNet for {file}")
    return source, index, denoisers[0]
