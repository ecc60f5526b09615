"""What pipelines ask of shared modules is found out once, unless the request has changed them."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.hooks import apply_group_offloading
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.pipelines.flux import pipeline_flux
from torch import Tensor, nn
from transformers import PreTrainedModel

from support.engine_driver import driving
from support.isolation import OneNet

WALKS = [0]  # not on the module, where it would be a change by the request


class Net(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Counts how often somebody walks through its parts."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        WALKS[0] += 1
        return super().named_modules(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x.to(self.inner.weight.dtype)).float()
        return y


class OfFlux:
    """Has the functions of a file of diffusers pinned, as that file's own pipelines do."""

    __module__ = pipeline_flux.__name__


class Asking(OfFlux, OneNet):
    """Asks at every step; what it is told to do to its module happens before the second."""

    def __call__(
        self,
        prompt: str | None = None,
        num_inference_steps: int = 3,
        write: Callable[[Any], object] | None = None,
        generator: torch.Generator | None = None,
    ) -> dict[str, Any]:
        x, told, walks = torch.randn(1, 4, generator=generator), [], 0
        for step in range(num_inference_steps):
            if step == 1 and write is not None:
                write(self.net)
            before = WALKS[0]
            where = pipeline_flux.get_module_execution_device(self.net)
            told.append((self.net.dtype, self.net.device, where))
            walks += WALKS[0] - before
            x = self.net(x)
        return {"images": x, "told": told, "walks": walks}


CPU = torch.device("cpu")
PLAIN = [torch.float32, CPU, CPU]


def test_requests_are_told_a_components_device_and_type_without_another_walk_through_it() -> None:
    with driving(Asking(Net()), isolation="shared") as drive:
        first = drive.submit("", seed=1)
        drive.finish()
        second, third = drive.submit("", seed=2), drive.submit("", seed=3, num_inference_steps=5)
        drive.finish()

    assert first.outcome.fields["walks"] > 0
    assert second.outcome.fields["walks"] == third.outcome.fields["walks"] == 0
    for one, steps in ((first, 3), (second, 3), (third, 5)):
        assert one.outcome.fields["told"] == [PLAIN] * steps


def test_a_request_that_has_changed_a_component_is_told_what_it_is_now() -> None:
    with driving(Asking(Net()), isolation="shared") as drive:
        plain = drive.submit("", seed=1)
        changing = drive.submit("", seed=2, write=lambda net: net.to(torch.float64))
        part = drive.submit("", seed=3, write=lambda net: net.inner.to(torch.float64))
        later = drive.submit("", seed=4)
        drive.finish()

    changed = [torch.float64, CPU, CPU]
    assert changing.outcome.fields["told"] == [PLAIN, changed, changed]
    assert part.outcome.fields["told"] == [PLAIN, changed, changed]
    assert plain.outcome.fields["told"] == later.outcome.fields["told"] == [PLAIN] * 3


def test_who_changes_a_component_before_anybody_asks_leaves_nothing_behind() -> None:
    with driving(Asking(Net()), isolation="shared") as drive:

        def early(net: Any) -> None:
            net.to(torch.float64)

        # asks for the first time after its own change
        changing = drive.submit("", seed=2, write=early, num_inference_steps=2)
        drive.finish()
        plain = drive.submit("", seed=1)
        drive.finish()

    assert changing.outcome.fields["told"][1][0] is torch.float64
    assert plain.outcome.fields["told"] == [PLAIN] * 3


def test_a_component_whose_weights_move_is_asked_every_time() -> None:
    net = Net()
    apply_group_offloading(net, onload_device=CPU, offload_type="leaf_level")

    with driving(Asking(net)) as drive:
        first = drive.submit("", seed=1)
        drive.finish()
        second = drive.submit("", seed=2)
        drive.finish()

    assert second.outcome.fields["walks"] == first.outcome.fields["walks"] > 0
    assert second.outcome.fields["told"] == [PLAIN] * 3


def test_an_engine_that_is_closed_leaves_diffusers_and_transformers_as_they_were() -> None:
    bases = (cls.__mro__ for cls in (ModelMixin, PreTrainedModel))
    owners = [next(cls for cls in classes if "device" in vars(cls)) for classes in bases]
    before = [vars(owner)["device"] for owner in owners]
    function = pipeline_flux.get_module_execution_device
    pipe = Asking(Net())

    with driving(pipe):
        assert pipeline_flux.get_module_execution_device is not function
        assert pipeline_flux.get_module_execution_device(pipe.net) == CPU  # outside of fibers
        assert pipe.net.dtype is torch.float32

    assert [vars(owner)["device"] for owner in owners] == before
    assert pipeline_flux.get_module_execution_device is function


def test_signatures_of_attention_processors_are_made_once_while_an_engine_runs() -> None:
    function = FluxAttnProcessor.__call__
    plain = inspect.signature(function)

    with driving("flux"), driving("flux"):
        assert vars(function)["__signature__"] == plain
        bound = inspect.signature(FluxAttnProcessor().__call__)
        assert list(bound.parameters) == list(plain.parameters)[1:]

    assert "__signature__" not in vars(function)
    assert inspect.signature(function) == plain
