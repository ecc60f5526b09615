"""Replaced attributes of classes, where others replace them as well."""

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

from carpool.engine.patches import Patches


class Base:
    def inherited(self) -> str:
        return "plain"


class Owner(Base):
    def own(self) -> str:
        return "plain"


def doubled(plain: Any) -> Any:
    def method(self: Any) -> str:
        return f"{plain(self)} {plain(self)}"

    return method


def patches() -> Patches:
    return Patches(Owner, {"own": doubled, "inherited": doubled})


def test_the_last_user_puts_the_plain_attributes_back() -> None:
    before, one = dict(vars(Owner)), patches()

    one.add()
    one.add()
    one.drop()
    assert (Owner().own(), Owner().inherited()) == ("plain plain", "plain plain")
    one.drop()

    assert dict(vars(Owner)) == before


def test_what_another_one_replaced_for_a_moment_is_not_put_back_for_good() -> None:
    """A library had its replacement in place as ours was put in, and took it out meanwhile."""
    plain, one = Owner.own, patches()

    Owner.own = lambda self: "for a moment"  # type: ignore[method-assign]
    one.add()
    Owner.own = plain  # type: ignore[method-assign]
    one.drop()

    assert Owner.own is plain
    assert "inherited" not in vars(Owner)


def test_what_another_one_replaces_while_ours_is_in_place_is_left_to_it() -> None:
    plain, one = Owner.own, patches()

    one.add()
    theirs = Owner.own = lambda self: "theirs"  # type: ignore[method-assign]
    one.drop()

    assert Owner.own is theirs
    Owner.own = plain  # type: ignore[method-assign]


# Private names of torch and diffusers that the engine builds on: a change there fails here first


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
