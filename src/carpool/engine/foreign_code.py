"""Foreign code, outside the known libraries: pipelines, schedulers, callbacks, layers and hooks.

The libraries' own code changes shared modules only in ways that `overlay.writes` detects at no
cost, and tables describe how their models fuse. Other code has neither: requests that run it are
watched more closely, and a module that contains it has to prove its table first.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

LIBRARIES = {
    *("accelerate", "bitsandbytes", "builtins", "carpool", "collections", "diffusers", "functools"),
    *("gguf", "numpy", "optimum", "peft", "torch", "torchao", "torchvision", "transformers"),
    *("PIL", "cv2", "einops", "flash_attn", "ftfy", "huggingface_hub", "hy3dgen", "imageio"),
    *("kornia", "regex", "safetensors", "sageattention", "scipy", "sentencepiece", "skimage"),
    *("tokenizers", "tqdm", "triton", "typing_extensions", "xformers"),
}


def runs_foreign_code(pipe: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of a pipeline runs foreign code, apart from its modules.

    Callbacks of diffusers count, too: they may write on modules where its pipelines do not, and so
    does the scale of a LoRA that the user has loaded.
    """
    parts = [pipe, *(part for part in vars(pipe).values() if not isinstance(part, nn.Module))]
    parts += all_blocks(getattr(pipe, "_blocks", None))
    return any(
        callable(v) or (isinstance(v, Mapping) and "scale" in v) for v in arguments.values()
    ) or any(_package(type(part)) not in LIBRARIES for part in parts)


def all_blocks(blocks: Any) -> Iterator[Any]:
    """The blocks of a modular pipeline, including nested ones."""
    yield blocks
    for block in getattr(blocks, "sub_blocks", {}).values():
        yield from all_blocks(block)


def foreign_parts(module: nn.Module, parts: Iterable[nn.Module] = ()) -> Iterator[Any]:
    """The classes and functions in a module from neither a known library nor its own package.

    Args:
        parts: the module and all its submodules, where the caller has them.
    """
    packages = {*LIBRARIES, _package(type(module))}
    shipped = set[type]()
    for part in parts or module.modules():
        entries = vars(part)
        hooks = *entries["_forward_hooks"].values(), *entries["_forward_pre_hooks"].values()
        own = [v for v in entries.values() if isinstance(v, (FunctionType, MethodType, partial))]
        for function in (part, entries.get("processor"), entries.get("forward"), *own, *hooks):
            if function is None or type(function) in shipped:
                continue
            while isinstance(function, partial):
                function = function.func
            code = function if hasattr(function, "__qualname__") else type(function)
            if _package(code) not in packages:
                yield code
            elif code is type(function):
                shipped.add(code)


def is_of_a_library(code: Any) -> bool:
    """Whether one of the known libraries ships a class or function."""
    return _package(code) in LIBRARIES


def is_nameless(code: Any) -> bool:
    """Whether a class or function was executed without a module, as by `exec(source, {})`."""
    if isinstance(code, type):  # such a class names `builtins`, whose own types are no heap types
        return code.__module__ == "builtins" and bool(code.__flags__ & 1 << 9)
    return isinstance(code, FunctionType) and "__name__" not in code.__globals__


def _package(code: Any) -> str:
    if is_nameless(code):
        return ""
    return str(getattr(code, "__module__", None) or "builtins").partition(".")[0]
