"""Find where diffusers takes a LoRA scale from attention kwargs, and whether a layer uses it."""

import inspect

from torch import nn


def takes_scale(cls: type[nn.Module]) -> bool:
    """Whether diffusers takes a LoRA scale from the attention kwargs of a module's `forward`."""
    return getattr(cls.forward, "__globals__", {}).get("__name__") == "diffusers.utils.peft_utils"


def has_lora_layers(module: nn.Module) -> bool:
    """Whether PEFT has wrapped layers of a module."""
    kinds = {base.__name__ for part in module.modules() for base in type(part).__mro__}
    return "BaseTunerLayer" in kinds


def idle_scale(module: nn.Module) -> str:
    """The attention kwargs from which diffusers reads a LoRA scale, if no LoRA layer uses it."""
    if not takes_scale(type(module)) or has_lora_layers(module):
        return ""
    return str(inspect.getclosurevars(type(module).forward).nonlocals.get("kwargs_name", ""))
