"""The work of one forward, counted on PyTorch's device `meta`: no weights, no values."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from carpool.engine.nested import tensors_in
from carpool.types import Phase, phase_of

_PLAIN = Tensor, bool, int, float, str, type(None)
META = torch.device("meta")
_VIEWS = (
    *("view", "reshape", "transpose", "permute", "expand", "slice", "select", "t", "unsqueeze"),
    *("squeeze", "split", "chunk", "unbind", "detach", "alias", "as_strided", "_unsafe_view"),
    *("unflatten", "split_with_sizes"),
)


@dataclass(slots=True)
class Work:
    """The work of one forward: operations, bytes, memory."""

    attention_flops: int = 0
    products: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # by (M, N, K)
    element_bytes: int = 0  # traffic of operations other than products
    operations: int = 0  # launched operations, without views
    peak_bytes: int = 0  # peak of live tensors, without weights

    @property
    def flops(self) -> int:
        products = sum(2 * prod(sides) * count for sides, count in self.products.items())
        return products + self.attention_flops

    def add(self, part: "Work", live_bytes: int) -> None:
        """Add the work of a part that began with so many bytes of live tensors."""
        self.attention_flops += part.attention_flops
        self.products.update(part.products)
        self.element_bytes += part.element_bytes
        self.operations += part.operations
        self.peak_bytes = max(self.peak_bytes, live_bytes + part.peak_bytes)


@dataclass(slots=True)
class CallGroup:
    """Calls of one method with equal shapes of arguments."""

    component: str
    method: str
    rows: int
    work: Work
    calls: int = 0  # calls of one request

    @property
    def phase(self) -> Phase:
        return phase_of(self.component, self.method)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products, element-wise traffic, operations and live memory of a forward on `meta`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work, self.live_bytes = Work(), 0
        self._alive: Counter[int] = Counter()  # live tensors by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, work = func._schema.name.removeprefix("aten::"), self.work
        if name == "_local_scalar_dense" and args[0].dtype == torch.bool:
            return True  # answers the question whether the mask is empty
        out = func(*args, **(kwargs or {}))
        tensors = list(tensors_in(out))
        for tensor in tensors:
            self.hold(tensor)
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            lhs, right = args[-2:]
            *batch, rows, inner = lhs.shape
            work.products[prod(batch) * rows, right.shape[-1], inner] += 1
        elif name == "convolution":
            weight, is_transposed = args[1], args[6]
            pixels = args[0] if is_transposed else out
            places = pixels.numel() // pixels.shape[1]
            work.products[places, weight.shape[0], prod(weight.shape[1:])] += 1
        elif name not in _VIEWS:
            work.element_bytes += sum(t.nbytes for t in (*tensors_in((args, kwargs)), *tensors))
        work.operations += name not in _VIEWS
        return out

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor as live until it is collected."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._alive[key] += 1
        if self._alive[key] == 1:
            self.live_bytes += size
            self.work.peak_bytes = max(self.work.peak_bytes, self.live_bytes)
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._alive[key] -= 1
        if not self._alive[key]:
            self.live_bytes -= size


class _Attention(TorchFunctionMode):
    """Counts attention as one operation, like fused kernels, which never write scores."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = [(kwargs or {}).get(name) for name in ("query", "key", "value")]
        query, key, value = [tensor for tensor in (*args, *named) if isinstance(tensor, Tensor)][:3]
        *batch, length, width = query.shape
        flops = 2 * prod(batch) * length * key.shape[-2] * (width + value.shape[-1])
        self._counter.work.attention_flops += flops
        self._counter.work.operations += 1
        return query.new_empty(*batch, length, value.shape[-1])


class _EqualBlocks:
    """Runs the first of equal blocks, and repeats its answer and its work for the others.

    FLUX has 57 blocks of two kinds: two run.
    """

    def __init__(self, module: Any, counter: _Counter) -> None:
        self._counter = counter
        self._first: dict[Any, tuple[Any, Work]] = {}
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
        self._blocks = {id(block): block for blocks in lists for block in blocks}.values()

    def __enter__(self) -> None:
        for block in self._blocks:
            vars(block)["forward"] = partial(self._run, block.forward, _structure(block))

    def __exit__(self, *_: object) -> None:
        for block in self._blocks:
            del vars(block)["forward"]

    def _run(self, forward: Callable[..., Any], structure: str, *args: Any, **kwargs: Any) -> Any:
        given, layout = tree_flatten((args, kwargs))
        has_list = any(isinstance(value, list) for value in (*args, *kwargs.values()))
        if has_list or not all(isinstance(value, _PLAIN) for value in given):
            del given
            return forward(*args, **kwargs)  # it may write to a list or a cache
        key = structure, str(layout), tuple(map(_outline, given))
        counter, work, live_bytes = self._counter, self._counter.work, self._counter.live_bytes
        counter.work = Work()
        if key in self._first:
            outline, part = self._first[key]
            answer = tree_map(lambda v: v.empty() if isinstance(v, _Outline) else v, outline)
        else:
            answer, part = forward(*args, **kwargs), counter.work
            part.peak_bytes = max(0, part.peak_bytes - live_bytes)
            self._first[key] = tree_map(_outline, answer), part
        counter.work = work
        work.add(part, live_bytes)
        return answer


def _structure(block: nn.Module) -> str:
    """What the work of a block depends on, apart from its arguments."""
    switches = [
        (name, attribute, value)
        for name, module in block.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, bool | str | None)
    ]
    shapes = [(name, tuple(p.shape), p.dtype) for name, p in block.named_parameters()]
    return f"{block!r} {switches} {shapes}"


@dataclass(frozen=True, slots=True)
class _Outline:
    """A tensor without its storage, which would count as live."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Outline(tuple(value.shape), value.stride(), value.dtype)
    return value


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Replace `torch.autocast`, which does not support the device `meta`, by a null context."""
    autocast = torch.autocast
    setattr(torch, "autocast", lambda *_, **__: nullcontext())  # noqa: B010 - it is a class
    try:
        yield
    finally:
        setattr(torch, "autocast", autocast)  # noqa: B010


def work_of(original: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Work]:
    """Run a method on `meta`; returns its answer and its `Work`."""
    arguments = tree_map(lambda v: v.to(META) if isinstance(v, Tensor) else v, (args, kwargs))
    counter = _Counter()
    blocks = _EqualBlocks(original.__self__, counter)  # type: ignore[attr-defined]
    with torch.no_grad(), _no_autocast(), blocks, _Attention(counter), counter:
        answer = original(*arguments[0], **arguments[1])
    return answer, counter.work
