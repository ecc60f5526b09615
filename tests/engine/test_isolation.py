"""What a request writes on shared modules, draws, or switches on is its own, and ends with it."""

import copy
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from carpool.config import EngineSettings
from carpool.engine.containment import EngineLost
from carpool.engine.model import load as load_module
from carpool.errors import LoadFailed
from support.engine_driver import Recorder, driving, fresh
from support.isolation import OneNet, differences, state_of


def add_one(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


class Doubling(ModelHook):  # type: ignore[misc]
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return 2 * output


class Processor:
    """A plain object, as most attention processors are; diffusers' IP-adapter has such a list."""

    def __init__(self) -> None:
        self.scale, self.shift = [1.0], 0.0


class Net(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A denoiser in which every kind of state shows in what it gives."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("large", torch.ones(2**18 + 1))  # its copy is not kept
        self.gain = 1.0
        self.gains = [1.0]
        self.options, self.processor = {"bias": 0.0}, Processor()
        self.added = self.second.register_forward_hook(add_one)
        HookRegistry.check_if_exists_or_initialize(self.first).register_hook(Doubling(), "earlier")

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        if x.dtype == torch.float64:
            x = x + 1
        if any(weight.requires_grad for weight in self.parameters()):
            x = x + 2
        x = x * self.gain * self.config.factor * sum(self.gains) + self.options["bias"]
        x = x * self.processor.scale[0] + self.processor.shift
        y: Tensor = x + self.shift * self.large[0]
        return y.float()


Write = Callable[[Any], object]


class Meddler(OneNet):
    """Calls its denoiser a few times; what it is told to do to it happens after the first."""

    def __call__(
        self,
        prompt: str | None = None,
        num_inference_steps: int = 3,
        write: Write | None = None,
        then: Write | None = None,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        x = torch.randn(1, 4, generator=generator)
        for i in range(num_inference_steps):
            x = self.net(x)
            if i == 0 and write is not None:
                write(self.net)
            if i == 1 and then is not None:
                then(self.net)
        return {"images": x}


def made() -> Meddler:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Meddler(Net())


def alone(*, seed: int, change: Write = lambda net: None, **arguments: Any) -> Tensor:
    pipe = made()
    change(pipe.net)
    for weight in pipe.net.parameters():
        weight.requires_grad_(False)
    pipe.net.eval()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    with torch.no_grad():
        given = {"generator": torch.Generator().manual_seed(seed), **arguments}
        return pipe("", **given)["images"]


def replace_child(net: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net.second = nn.Linear(4, 4).requires_grad_(False)


def pop_child(net: Any) -> None:
    """As diffusers' `set_processor` does: in the dictionary itself, then an ordinary attribute."""
    net._modules.pop("first")
    net.first = None


def add_hook(net: Any) -> None:
    net.register_forward_hook(lambda module, args, output: 3 * output)


def add_diffusers_hook(net: Any) -> None:
    HookRegistry.check_if_exists_or_initialize(net.second).register_hook(Doubling(), "double")


def write_config(net: Any) -> None:
    net.config.factor = 0.75  # diffusers' FrozenDict is not frozen


def add_attribute(net: Any) -> None:
    net.new, net.gain = True, 2.0


def write_list(net: Any) -> None:
    net.gain = 1.5
    net.gains.append(1.0)


def write_list_first(net: Any) -> None:
    net.gains.append(1.0)
    net.gain = 1.5


def delete(net: Any) -> None:
    del net.second


def add_in_place(net: Any) -> None:
    net.second.weight += 0.5
    net.second.weight = net.second.weight  # what `+=` on an attribute does, once more


def load(net: Any) -> None:
    net.first.load_state_dict({name: 2 * one for name, one in net.first.state_dict().items()})


def write_data_later(net: Any) -> None:
    """Between what is read and what is written, nothing of the module is called."""
    weights = [one.data for one in net.parameters()]
    for one in weights:
        one.mul_(0.5)


def write_numpy(net: Any) -> None:
    net.second.weight.numpy()[0] += 1.0


def write_parts(net: Any) -> None:
    for part in torch.split(torch.detach(net.second.weight), 2):
        torch.narrow(part, 1, 0, 2).add_(1.0)


WRITES: dict[str, Write] = {
    "data in place": lambda net: net.second.weight.data.add_(1.0),
    "data of all weights": write_data_later,
    "data": lambda net: setattr(net.second.bias, "data", torch.ones(4)),
    "weight in place": lambda net: net.second.weight.mul_(2.0),
    "entry of a weight": lambda net: net.second.weight.__setitem__(0, 3.0),
    "operator": add_in_place,
    "view of a weight": lambda net: net.second.weight[0].add_(1.0),
    "reshaped weight": lambda net: net.second.weight.view(-1).mul_(0.5),
    "transposed weight": lambda net: net.second.weight.T.__setitem__(0, 1.0),
    "row of a weight": lambda net: next(iter(net.second.weight)).zero_(),
    "detached weight": lambda net: net.second.weight.detach().add_(1.0),
    "numpy's view of a weight": write_numpy,
    "numpy's array of a weight": lambda net: np.asarray(net.second.weight).__imul__(2.0),
    "state dict": lambda net: net.state_dict()["second.weight"].add_(1.0),
    "initialization": lambda net: nn.init.zeros_(net.first.weight),
    "loaded weights": load,
    "function's view of a weight": lambda net: torch.transpose(net.second.weight, 0, 1).add_(1.0),
    "functions' views of weights": write_parts,
    "weight for the output": lambda net: torch.add(net.first.weight, 1.0, out=net.second.weight),
    "function on a list": lambda net: torch._foreach_mul_(list(net.parameters()), 0.5),
    "buffer in place": lambda net: net.shift.zero_(),
    "large buffer in place": lambda net: net.large.zero_(),
    "data of a large buffer": lambda net: net.large.data.zero_(),
    "view of a large buffer": lambda net: net.large[:1].zero_(),
    "one requires_grad": lambda net: net.second.bias.requires_grad_(),
    "one requires_grad set": lambda net: setattr(net.first.weight, "requires_grad", True),
    "removed hook": lambda net: net.added.remove(),
    "removed diffusers hook": lambda net: net.first._diffusers_hook.remove_hook("earlier"),
    "attribute": lambda net: setattr(net, "gain", 3.0),
    "new attribute": add_attribute,
    "list": write_list,
    "list alone": lambda net: net.gains.append(2.0),
    "entry of a list": lambda net: net.gains.__setitem__(0, 3.0),
    "dictionary": lambda net: net.options.update(bias=1.0),
    "attribute of a processor": lambda net: setattr(net.processor, "shift", 1.0),
    "list of a processor": lambda net: net.processor.scale.__setitem__(0, 2.0),
    "list, then attribute": write_list_first,
    "child": replace_child,
    "popped child": pop_child,
    "deleted child": delete,
    "buffer": lambda net: net.register_buffer("shift", torch.zeros(4)),
    "parameter": lambda net: net.second.register_parameter("bias", None),
    "hook": add_hook,
    "diffusers hook": add_diffusers_hook,
    "config": lambda net: net.register_to_config(factor=0.25),
    "config in place": write_config,
    "requires_grad": lambda net: net.requires_grad_(True),
    "number type": lambda net: net.to(torch.float64).register_forward_pre_hook(
        lambda module, args: (args[0].double(),)
    ),
}


def same(recorder: Recorder, expected: Tensor) -> bool:
    return bool(torch.allclose(recorder.image.detach(), expected.detach(), atol=1e-6))


UNREPORTED = {  # changes of values, and of what a module holds beside its attributes
    *(name for name in WRITES if "weight" in name or "data" in name or "buffer" in name),
    *("operator", "initialization", "function on a list", "state dict"),
    *("list alone", "entry of a list", "dictionary", "list of a processor"),
    *("attribute of a processor", "list, then attribute"),
    *("one requires_grad", "one requires_grad set"),
} - {"buffer"}


@pytest.mark.parametrize(
    ("name", "isolation"),
    [(name, "auto") for name in WRITES]
    + [(name, "shared") for name in WRITES if name not in UNREPORTED],
)
def test_what_a_request_writes_on_a_module_is_seen_by_itself_alone(
    name: str, isolation: str
) -> None:
    write, pipe = WRITES[name], made()
    before = state_of(made())

    def fail(net: Any) -> None:
        raise ValueError("on purpose")

    with driving(pipe, isolation=isolation) as drive:
        plain = [drive.submit("", seed=seed, num_inference_steps=4) for seed in (1, 2)]
        meddling = drive.submit("", seed=3, num_inference_steps=5, write=write)
        failing = drive.submit("", seed=4, write=write, then=fail)
        cancelled = drive.submit("", seed=5, write=write, request_id="cancelled")
        drive.turn_until(lambda: all(one.events for one in plain))
        drive.turn(7)
        drive.engine.cancel("cancelled")
        later = drive.submit("", seed=6)
        drive.finish()
        exclusive = drive.engine.timeline(meddling.outcome.request.request_id)
        ordinary = drive.engine.timeline(later.outcome.request.request_id)

    assert all(
        same(one, alone(seed=seed, num_inference_steps=4))
        for one, seed in zip(plain, (1, 2), strict=True)
    )
    assert same(meddling, alone(seed=3, num_inference_steps=5, write=write))
    assert not same(meddling, alone(seed=3, num_inference_steps=5))  # it does mean something
    assert same(later, alone(seed=6))
    assert failing.error is not None
    assert cancelled.error is not None
    assert exclusive is not None
    assert exclusive["exclusive"] == ["net"]
    assert ordinary is not None
    assert ordinary["exclusive"] == []
    assert differences(before, state_of(pipe)) == []


def test_a_weight_of_two_modules_is_one_weight_in_every_request() -> None:
    def tied() -> Meddler:
        pipe = made()
        pipe.net.second.weight = pipe.net.first.weight
        return pipe

    def write(net: Any) -> None:
        net.first.new, net.second.new = 1, 1  # so that both are known before the weight is
        net.second.weight.data.add_(1.0)

    pipe, judge = tied(), tied()
    judge.net.requires_grad_(False)
    with driving(pipe) as drive:
        writing = drive.submit("", seed=1, write=write, num_inference_steps=5)
        plain = drive.submit("", seed=2, num_inference_steps=8)
        drive.finish()

    with torch.no_grad():
        plainly: dict[str, Any] = {
            "generator": torch.Generator().manual_seed(2),
            "num_inference_steps": 8,
        }
        assert same(plain, judge("", **plainly)["images"])
        given = torch.Generator().manual_seed(1)
        expected = judge("", write=write, num_inference_steps=5, generator=given)["images"]
    assert same(writing, expected)
    assert differences(state_of(tied()), state_of(pipe)) == []


def write_unseen(net: Any) -> None:
    weight = net.second.weight.detach()
    thread = threading.Thread(target=lambda: weight.view(-1).add_(1.0))  # which no fiber has
    thread.start()
    thread.join()


def test_no_picture_leaves_of_weights_that_were_written_unseen_while_requests_ran() -> None:
    with driving(made(), isolation="shared") as drive:
        recorders = [drive.submit("", seed=seed, num_inference_steps=6) for seed in (1, 2)]
        drive.submit("", write=write_unseen)
        with pytest.raises(EngineLost, match="the weights of net were changed in place"):
            drive.finish()

        assert not any(recorder.outcomes for recorder in recorders)


def test_weights_that_their_owner_writes_between_requests_are_the_models() -> None:
    pipe = made()
    with driving(pipe) as drive:
        drive.submit("", seed=1)
        drive.finish()
        write_unseen(pipe.net)
        later = drive.submit("", seed=1)
        drive.finish()

    assert same(later, alone(seed=1, change=write_unseen))


def read_weights(net: Any) -> None:
    net.to(torch.float32).eval()
    copy.deepcopy(net.first)
    assert float(net.second.weight.data.sum()) != 0
    assert float(net.second.weight[0].sum() + net.second.weight.T.sum()) != 0
    assert net.state_dict()["second.weight"].numpy().any()


def test_writes_that_change_nothing_cost_nothing() -> None:
    with driving(made(), isolation="shared") as drive:
        writing = drive.submit("", write=read_weights)
        drive.finish()
        life = drive.engine.timeline(writing.outcome.request.request_id)

    assert life is not None
    assert life["exclusive"] == []


def names_of_libraries() -> dict[tuple[int, str], int]:
    """What the modules and classes of the libraries hold, by owner and name."""
    owners: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("diffusers", "numpy", "peft", "random", "torch"):
            owners[id(module)] = module
        elif name.partition(".")[0] != "transformers" or "Lazy" in type(module).__name__:
            continue
        values = list(vars(module).values())
        owners |= {id(value): value for value in values if issubclass(type(value), type)}
    return {
        (known, name): id(value)
        for known, owner in owners.items()
        for name, value in list(vars(owner).items())
        if not issubclass(type(value), int)  # a counter
    }


def test_an_engine_replaces_few_names_of_the_libraries() -> None:
    pipe = fresh("sdxl")
    before = names_of_libraries()
    with driving(pipe) as drive:
        during = names_of_libraries()
        drive.submit("a cat", num_inference_steps=1)
        drive.finish()
        replaced = [key for key, value in before.items() if during.get(key) != value]

    assert 10 < len(replaced) <= 40
    assert {key: value for key, value in names_of_libraries().items() if key in before} == before


def test_a_pipeline_keeps_its_modes_over_an_engine() -> None:
    pipe = made()
    pipe.net.train()
    pipe.net.first.requires_grad_(False)
    pipe.set_progress_bar_config(desc="mine")
    before = state_of(pipe)

    with driving(pipe) as drive:
        drive.submit("")
        drive.finish()

    assert differences(before, state_of(pipe)) == []
    assert pipe._progress_bar_config == {"desc": "mine"}


def test_no_class_is_patched_while_a_library_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate exchanges `nn.Module.register_parameter` for as long, and puts it back."""
    patched = threading.Event()

    def start_another() -> None:
        with driving(made()):
            patched.set()

    def loads(*_: Any) -> Any:
        other.start()
        assert not patched.wait(0.3)
        raise OSError("no such model")

    other = threading.Thread(target=start_another)
    monkeypatch.setattr(load_module, "read", loads)
    with pytest.raises(LoadFailed):
        load_module.load("shapes", EngineSettings(device="cpu"))
    other.join()

    assert patched.is_set()
