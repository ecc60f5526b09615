"""Run a pipeline on shapes alone: its own code runs, its modules give zeros of the right shapes.

The modules are built from their configs without weights (PyTorch's device `meta`). A call of one is
run there, which gives the shapes of its answer and what it takes: `Work`. The pipeline goes on with
zeros. So whatever a pipeline does, in whatever order, is what is counted.
"""

import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from carpool.engine.intercept import methods_of
from carpool.errors import LoadFailed, nearest
from carpool.types import Phase, phase_of

MODELS = Path(__file__).with_name("models.json")
META = torch.device("meta")
_VIEWS = frozenset(["view", "reshape", "transpose", "permute", "expand", "slice", "select", "t", "unsqueeze", "squeeze", "split", "chunk", "unbind", "detach", "alias", "as_strided", "_unsafe_view", "unflatten", "split_with_sizes"])  # fmt: skip


@dataclass(slots=True)
class Work:
    """What one forward of a call's rows takes."""

    flops: int = 0
    attention_flops: int = 0  # of those
    products: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # by (M, N, K)
    element_bytes: int = 0  # that operations other than products read and write
    operations: int = 0  # that a device is given; not views
    peak_bytes: int = 0  # alive at once, without weights


@dataclass(slots=True)
class Stage:
    """All calls of one method with arguments of the same shapes."""

    component: str
    method: str
    rows: int
    work: Work
    calls: int = 0  # of one request

    @property
    def phase(self) -> Phase:
        return phase_of(self.component, self.method)


@dataclass(frozen=True, slots=True)
class Model:
    """A pipeline of modules without weights."""

    name: str
    pipe: Any
    modules: Mapping[str, nn.Module]
    call: Mapping[str, Any]  # usual arguments
    sizes: tuple[str, ...]
    source: str

    def parameters(self) -> dict[str, int]:
        """Weights by component."""
        return {n: sum(p.numel() for p in m.parameters()) for n, m in self.modules.items()}


class Tokenizer:
    """Gives every text the same number of tokens: all that a pipeline may take."""

    def __init__(self, length: int) -> None:
        self.model_max_length, self.pad_token_id = length, 0

    def __call__(self, text: Any, max_length: int | None = None, **_: Any) -> Any:
        count = 1 if isinstance(text, str) else len(text)
        length = min(max_length or self.model_max_length, self.model_max_length)
        ids = torch.ones(count, length, dtype=torch.int64)
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": ids.clone()})

    def tokenize(self, _: str) -> list[str]:
        return []

    def batch_decode(self, ids: Tensor) -> list[str]:
        return [""] * len(ids)


def known() -> dict[str, Any]:
    """The real-size models that come with the planner, by name."""
    data: dict[str, Any] = json.loads(MODELS.read_text())
    return data


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Build a pipeline of configs, without weights.

    Raises:
        LoadFailed: the model is not known.
    """
    models = known()
    if name not in models:
        raise LoadFailed(f"no configs of {name!r}{nearest(name, models)}: there are "
                         f"{', '.join(models)}")  # fmt: skip
    data = models[name]
    parts, modules = {}, {}
    for component, (library, *what) in data["components"].items():
        if library == "tokenizer":
            parts[component] = Tokenizer(what[0])
            continue
        cls = getattr(diffusers if library == "diffusers" else transformers, what[0])
        if not issubclass(cls, nn.Module):
            parts[component] = cls(**what[1])
            continue
        with META:
            module = (
                cls(cls.config_class(**what[1])) if library == "transformers" else cls(**what[1])
            )
        parts[component] = modules[component] = module.to(dtype).eval().requires_grad_(False)
    pipe = getattr(diffusers, data["pipeline"])(**parts)
    pipe.set_progress_bar_config(disable=True)
    return Model(name, pipe, modules, data["call"], tuple(data["sizes"]), data["source"])


class _Counter(TorchDispatchMode):
    """Counts products, element-wise traffic, operations and live memory of a forward on `meta`."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work, self._live = work, 0
        self._alive: Counter[int] = Counter()  # tensors by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, work = func._schema.name.removeprefix("aten::"), self._work
        tensors = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        for one in tensors:
            self._hold(one)
        if name in ("mm", "addmm"):
            left, right = args[-2], args[-1]
            work.products[left.shape[0], right.shape[1], left.shape[1]] += 1
        elif name == "bmm":
            b, m, k = args[0].shape
            work.products[b * m, args[1].shape[2], k] += 1
        elif name == "convolution":
            weight = args[1]
            work.products[out.numel() // out.shape[1], weight.shape[0], prod(weight.shape[1:])] += 1
        elif name not in _VIEWS:
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            work.element_bytes += sum(one.numel() * one.element_size() for one in given + tensors)
        work.operations += name not in _VIEWS
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._alive[key] += 1
        if self._alive[key] == 1:
            self._live += size
            self._work.peak_bytes = max(self._work.peak_bytes, self._live)
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._alive[key] -= 1
        if not self._alive[key]:
            self._live -= size


class _Attention(TorchFunctionMode):
    """Takes attention as one operation, as fused kernels do: scores are never written."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = (
                args + tuple((kwargs or {}).get(n) for n in ("query", "key", "value"))
            )[:3]
            *batch, length, width = query.shape
            flops = 2 * prod(batch) * length * key.shape[-2] * (width + value.shape[-1])
            self._work.attention_flops += flops
            self._work.operations += 1
            return query.new_empty(*batch, length, value.shape[-1])
        return func(*args, **(kwargs or {}))


def work_of(original: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Work]:
    """Run a method on `meta`; its answer, and what it takes."""
    work = Work()
    given = tree_map(lambda one: one.to(META) if isinstance(one, Tensor) else one, (args, kwargs))
    flops = FlopCounterMode(display=False)
    with torch.no_grad(), flops, _Attention(work), _Counter(work):
        answer = original(*given[0], **given[1])
    work.flops = flops.get_total_flops() + work.attention_flops
    return answer, work


def stages(model: Model, width_px: int, height_px: int) -> list[Stage]:
    """What one request makes its modules do, in the order in which it first does.

    Args:
        model: of `build`; nothing of it is changed.
    """
    found: dict[Any, tuple[Stage, Any]] = {}

    def stub(component: str, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            tensors = [one for one in leaves if isinstance(one, Tensor)]
            key = component, method, tuple(tuple(one.shape) for one in tensors)
            if key not in found:
                answer, work = work_of(original, args, kwargs)
                rows = tensors[0].shape[0] if tensors else 1
                found[key] = Stage(component, method, rows, work), answer
            stage, answer = found[key]
            stage.calls += 1
            return _zeros(answer)

        call.__signature__ = signature(original)  # type: ignore[attr-defined]
        return call

    replaced: list[tuple[nn.Module, str]] = []
    try:
        for component, module in model.modules.items():
            for method in methods_of(module):
                if method != "generate":
                    vars(module)[method] = stub(component, method, getattr(module, method))
                    replaced.append((module, method))
        own = type(model.pipe)
        cls = type(
            own.__name__,
            (own,),
            {"_execution_device": torch.device("cpu"), "__module__": own.__module__},
        )
        before, model.pipe.__class__ = model.pipe.__class__, cls
        try:
            model.pipe(
                prompt="a plan", width=width_px, height=height_px, output_type="pt", **model.call
            )
        finally:
            model.pipe.__class__ = before
    finally:
        for module, method in replaced:
            del vars(module)[method]
    return [stage for stage, _ in found.values()]


def _zeros(answer: Any) -> Any:
    """An answer on `meta` as zeros on the host, which take next to no memory."""
    if hasattr(answer, "latent_dist"):
        raise LoadFailed("pictures that are encoded are not planned")
    return tree_map(
        lambda one: (
            one.new_zeros((), device="cpu").expand(one.shape) if isinstance(one, Tensor) else one
        ),
        answer,
    )
