"""Private names of torch and diffusers that the engine builds on: a change there fails here first.

Neither library promises them. Each is listed with the file that uses it, and where it matters with
what it has to do.
"""

import importlib
import inspect
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.hooks import HookRegistry
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_flux import FluxAttention
from diffusers.modular_pipelines import ModularPipeline
from torch import nn

NAMES = [  # module, path of the name, file of ours
    ("torch", "_C._len_torch_function_stack", "engine/thread_modes.py"),
    ("torch.overrides", "_pop_mode", "engine/thread_modes.py"),
    ("torch.overrides", "_push_mode", "engine/thread_modes.py"),
    ("torch.overrides", "_get_current_function_mode_stack", "engine/sweep.py, group/leader.py"),
    ("torch.utils._pytree", "tree_map", "engine/model/border.py"),
    ("torch._dynamo.callback", "callback_handler.register_start_callback", "engine/intercept.py"),
    ("torch._dynamo.callback", "callback_handler.remove_end_callback", "engine/intercept.py"),
    ("torch.nn", "Module._call_impl", "engine/intercept.py"),
    ("diffusers.models.attention_dispatch", "AttentionBackendName", "engine/model/attention.py"),
]
SOURCES: list[tuple[Any, str, str]] = [  # whose source has what, and the file of ours
    (nn.Module._wrapped_call_impl, "self._compiled_call_impl is not None", "engine/intercept.py"),
    (HookRegistry.check_if_exists_or_initialize, "_diffusers_hook", "engine/weights/groups.py"),
    (ConfigMixin, "_internal_dict", "engine/overlay/shared_modules.py"),
    (ModularPipeline.__init__, "self._blocks = ", "engine/model/modular.py"),
    (ModularPipeline.__init__, "self._components_manager = ", "engine/model/view.py"),
    (ModelMixin.set_attention_backend, "_attention_backend", "engine/model/attention.py"),
    (FluxAttention.forward, "inspect.signature(self.processor.__call__)", "engine/model/pins.py"),
]


@pytest.mark.parametrize(("module", "path", "file"), NAMES)
def test_a_private_name_is_still_there(module: str, path: str, file: str) -> None:
    found: Any = importlib.import_module(module)

    for name in path.split("."):
        assert hasattr(found, name), f"{module}.{path} is gone: see {file}"
        found = getattr(found, name)


@pytest.mark.parametrize(("owner", "text", "file"), SOURCES)
def test_code_of_a_library_still_does_what_is_built_on(owner: Any, text: str, file: str) -> None:
    assert text in inspect.getsource(owner), f"{owner.__qualname__} has changed: see {file}"


def test_what_replaces_a_modules_call_runs_before_its_forward() -> None:
    """By this an engine intercepts, and leaves `forward` to the hooks of others."""
    module = nn.Linear(2, 2)
    module.__dict__["_compiled_call_impl"] = lambda x: x + 1

    assert torch.equal(module(torch.zeros(1, 2)), torch.ones(1, 2))
