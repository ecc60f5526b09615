"""Refuse pipelines whose hooks would mix up requests: step caches, and uncontrolled offloading.

Hooks are on any part of a module, added by methods of the pipeline or by functions such as
`diffusers.apply_first_block_cache` and `accelerate.cpu_offload`.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from carpool.errors import LoadFailed


def refuse_what_breaks(pipe: Any) -> None:
    """Check a pipeline's hooks.

    Raises:
        LoadFailed: a hook is not supported; the text names component, hook and alternative.
    """
    manager = getattr(pipe, "_components_manager", None)
    if getattr(pipe, "_all_hooks", None) or getattr(manager, "_auto_offload_enabled", False):
        raise LoadFailed(
            "model CPU offload swaps modules under running requests: use group offload"
        )
    for name, module in pipe.components.items():
        if not isinstance(module, nn.Module):
            continue
        for path, part in module.named_modules():
            where = f"{name}.{path}".rstrip(".")
            for hook in getattr(vars(part).get("_diffusers_hook"), "hooks", {}).values():
                if getattr(hook, "_is_stateful", False):
                    raise LoadFailed(
                        f"{where} has a {type(hook).__name__}, a step cache that mixes up "
                        "requests: disable_cache(), or load the pipeline without it"
                    )
            if any(getattr(hook, "offload", False) for hook in _accelerate_hooks(part)):
                raise LoadFailed(f"{where} is offloaded sequentially: use group offload instead")


def _accelerate_hooks(part: nn.Module) -> Iterator[Any]:
    waiting = [vars(part).get("_hf_hook")]
    while waiting:
        hook = waiting.pop()
        yield hook
        waiting.extend(getattr(hook, "hooks", ()))  # a `SequentialHook` contains others
