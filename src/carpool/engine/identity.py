"""The identity of a model: everything that its answers, its costs and its evidence depend on.

| part | content | costs | evidence | journals |
| --- | --- | --- | --- | --- |
| source | the model's name or folder, its revision | x | | |
| versions | torch, diffusers and transformers | x | x | x |
| device | its name, dtype and threads; for journals its kind and dtype | x | x | x |
| code | pipelines, blocks, modules, attention processors, hooks | | x | x |
| configuration | components, without their source folder | x | x | x |
| preparation | dtypes, quantization, compiled parts, hooks, attention, tiles | x | | |
| weights | a few values of each | | | x |

Costs are stored as readable text; the others as digests. Evidence belongs to one module, which may
change while an engine runs. A journal goes to other machines: names and folders are not part of its
identity.
"""

import hashlib
import inspect
import json
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from carpool.engine.foreign_code import all_blocks, foreign_parts
from carpool.engine.intercept import is_compiled
from carpool.engine.model.libraries import versions
from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.weights.sample import sample

FORMAT = 2  # part of each identity: a new value discards all stored data


def identity_of_costs(loaded: LoadedPipeline, revision: str | None) -> dict[str, Any]:
    """The identity of a model's learned costs. JSON; short."""
    device, modules = loaded.device, sorted(loaded.modules.items())
    prepared = {name: _preparation(module) for name, module in modules}
    return {
        "format": FORMAT,
        "model": loaded.source,
        "revision": revision,
        "device": device.name,
        "threads": None if device.is_accelerator else os.environ.get("OMP_NUM_THREADS"),
        "dtype": str(device.dtype),
        "prepared": {**prepared, "numbers": torch.get_float32_matmul_precision()},
        **versions(),
    }


def identity_of_answers(loaded: LoadedPipeline) -> bytes:
    """The identity of a model's answers, for journals: 32 bytes, equal on every machine."""
    pipelines = {id(pipe): pipe for pipe in (loaded.pipe, *loaded.originals.values())}.values()
    code = [
        _source(type(block))
        for pipe in pipelines
        for block in (pipe, *all_blocks(getattr(pipe, "blocks", None)))
    ]
    components = [
        (name, type(part).__name__, _configuration(part))
        for pipe in pipelines
        for name, part in sorted(pipe.components.items())
    ]
    sampled = {} if loaded.streamer is None else loaded.streamer.samples
    modules = [
        (name, _source(type(module)), (sampled.get(name) or sample(module)).hex())
        for name, module in sorted(loaded.modules.items())
    ]
    device = loaded.device.torch.type, str(loaded.device.dtype)
    return _digest(versions(), device, code, components, modules, size=32)


class ModuleIdentities:
    """The identities of modules, for the evidence that their calls fuse; cached.

    Args:
        versions: versions of the libraries that affect answers.
    """

    def __init__(self, versions: Mapping[str, str] | None = None) -> None:
        self._versions = dict(versions or {})
        self._identities: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str]]
        self._identities = weakref.WeakKeyDictionary()
        self._sources: dict[Any, str] = {}

    def of(self, module: nn.Module) -> str:
        """The current identity of a module."""
        code = tuple(dict.fromkeys(_codes(module)))
        before, state = self._identities.get(module), (code, module.training)
        if before is not None and before[0] == state:
            return before[1]
        for part in code:
            if part not in self._sources:
                self._sources[part] = _source(part)
        weights = [*module.parameters()]
        numbers, devices = {str(w.dtype) for w in weights}, {str(w.device) for w in weights}
        device = sorted(devices), torch.get_num_threads(), sorted(numbers)
        sources = [self._sources[part] for part in code]
        identity = _digest(
            self._versions, device, sources, _configuration(module), module.training, size=12
        ).hex()
        self._identities[module] = state, identity
        return identity


def _digest(*parts: Any, size: int) -> bytes:
    text = json.dumps([FORMAT, *parts], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def _codes(module: nn.Module) -> Iterator[Any]:
    """The classes and functions that compute a module's answers."""
    for part in module.modules():
        yield type(part)
        if hasattr(part, "processor"):
            yield type(part.processor)
    yield from foreign_parts(module)


def _source(code: Any) -> str:
    """The name of a class or function, and a digest of its file."""
    try:
        text = inspect.getsource(inspect.getmodule(code) or code)
    except (OSError, TypeError):
        text = ""  # created at run time
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return f"{code.__module__}.{code.__qualname__}:{digest}"


def _configuration(part: Any) -> str:
    """The configuration of a component, without its source folder."""
    config = getattr(part, "config", None) or {}
    entries = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(entries, Mapping):
        return ""
    plain = {name: value for name, value in entries.items() if not name.startswith("_")}
    return json.dumps(plain, sort_keys=True, default=_as_text)


def _as_text(value: Any) -> str:
    is_plain = isinstance(value, (torch.dtype, torch.device))  # else the text may hold an address
    return str(value) if is_plain else type(value).__name__


def _preparation(module: nn.Module) -> dict[str, Any]:
    """The preparation of a module, which affects the seconds of its forwards."""
    weights = [*module.parameters(), *module.buffers()]
    parts = list(module.modules())
    kinds = [type(getattr(weight, "data", weight)).__name__ for weight in weights]  # quantized?
    places = Counter(f"{w.dtype} {w.device} {kind}" for w, kind in zip(weights, kinds, strict=True))
    config = hashlib.sha256(_configuration(module).encode()).hexdigest()[:12]
    return {
        "class": type(module).__name__,
        "config": config,
        "weights": dict(sorted(places.items())),
        "layers": dict(sorted(Counter(type(part).__name__ for part in parts).items())),
        "compiled": sum(map(is_compiled, parts)),
        "hooks": dict(sorted(Counter(name for part in parts for name in _hooks(part)).items())),
        "tiles": getattr(module, "use_tiling", False),
        "attention": sorted({name for part in parts if (name := _back_end(part)) is not None}),
    }


def _hooks(part: nn.Module) -> list[str]:
    names = [*getattr(vars(part).get("_diffusers_hook"), "hooks", {})]
    return [*names, "accelerate"] if vars(part).get("_hf_hook") is not None else names


def _back_end(part: nn.Module) -> str | None:
    """The attention back end of a layer, if one was chosen."""
    processor = vars(part).get("processor")
    if (share := getattr(processor, "share", None)) is not None:
        return f"sparse {share}"
    own = getattr(processor, "_attention_backend", None)
    back_end = own or getattr(getattr(part, "config", None), "_attn_implementation", None)
    return None if back_end is None else str(getattr(back_end, "value", back_end))
