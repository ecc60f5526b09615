"""A pretended accelerator: tensors with real values, which torch takes for those of another device.

`install` registers the device "pretended" by PyTorch's Python back end for "privateuse1", for the
whole process and for good: so only processes that are made for it do (`process.py`). Whatever runs
on it runs on the CPU, one operation after another, and is watched as a real device would feel it:

- operations that make the host wait are reported with file and line (`report.py`);
- tensors of two devices in one operation are an error, as they are on a real one;
- memory that is read before its copy is done, in another stream or on the host, is an error
  (`order.py`); memory that was pinned is a tensor of the host that takes part in this.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._mode_utils import no_dispatch

from support.pretended.order import (
    MEMORY,
    ORDER,
    Event,
    Extent,
    Memory,
    Stream,
    check_life,
    host_uses,
    launch,
)
from support.pretended.report import REPORT, here

NAME, COUNT = "pretended", 2
CPU = torch.device("cpu")

_READS_VALUES = {  # the shape, or the Python value, of the result depends on values
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
    "aten::equal": "equal",
    "aten::masked_select": "masked_select",
    "aten::is_nonzero": "bool",
    "aten::_unique2": "unique",
    "aten::unique_consecutive": "unique",
    "aten::unique_dim": "unique",
    "aten::bincount": "bincount",
}
_METADATA = {  # touch no memory
    "aten::detach",
    "aten::_has_compatible_shallow_copy_type",
    "aten::set_",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_TAKES_CPU_INDICES = {"aten::index", "aten::index_put_", "aten::index_put"}


class Pretended(Tensor):
    """A tensor on the pretended device, or in pinned host memory."""

    elem: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, elem: Tensor, device: torch.device, memory: Memory | None = None) -> Any:
        if isinstance(elem, Pretended):
            raise TypeError("a pretended tensor in another one")
        device = _numbered(device)
        made: Any = Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(),
            dtype=elem.dtype, layout=elem.layout, device=device, requires_grad=False,
        )  # fmt: skip
        made.elem = elem
        size = elem.untyped_storage().nbytes()
        made.memory = memory or Memory(size, is_host=device.type == "cpu")
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.elem!r}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pretended":
        copied: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]

    @property
    def extent(self) -> Extent:
        """The bytes of its memory between its first and its last element."""
        elem = self.elem
        begin = int(elem.storage_offset()) * elem.itemsize
        if not elem.numel():
            return self.memory, (begin, begin)
        steps = zip(elem.shape, elem.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        return self.memory, (begin, begin + int(last + 1) * elem.itemsize)

    @property
    def is_on_host(self) -> bool:
        return self.device.type == "cpu"

    def record_stream(self, stream: Any) -> None:
        self.memory.used_by.add(stream.stream_id)

    def is_pinned(self, device: Any = None) -> bool:
        return self.is_on_host

    def pin_memory(self, device: Any = None) -> Tensor:
        assert self.is_on_host, "cannot pin memory of a device"
        return self

    def numpy(self, *, force: bool = False) -> Any:
        if not self.is_on_host and not force:
            raise TypeError(f"can't convert {self.device} tensor to numpy: use Tensor.cpu()")
        return self._on_host("numpy").numpy()

    def tolist(self) -> Any:
        return self._on_host("tolist").tolist()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Any:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **more)

    def __getitem__(self, index: Any) -> Any:
        def listed(one: Any) -> Any:  # torch makes a tensor of it on the CPU, and copies that
            return _plain["tensor"](list(one)) if isinstance(one, (list, range)) else one

        many = tuple(map(listed, index)) if isinstance(index, tuple) else listed(index)
        return Tensor.__getitem__(self, many)

    def _on_host(self, kind: str) -> Tensor:
        if not self.is_on_host:
            REPORT.sync(kind)
            ORDER.current.synchronize()
        host_uses([self.extent], is_write=False, what=f"{kind} at {here()}")
        return self.elem


def tree_leaves(tree: Any) -> list[Any]:
    """As torch's, of what operations take: torch's own took a third of the time."""
    if isinstance(tree, (list, tuple)):
        return [leaf for one in tree for leaf in tree_leaves(one)]
    if isinstance(tree, dict):
        return tree_leaves(list(tree.values()))
    return [tree]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([tree_map(function, one) for one in tree])
    if isinstance(tree, dict):
        return {name: tree_map(function, one) for name, one in tree.items()}
    return function(tree)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on the values, and report what it would do on a device."""
    name = func._schema.name
    check_life()
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    remote = [one for one in tensors if isinstance(one, Pretended) and not one.is_on_host]
    if name == "aten::copy_":
        return _copy(args[0], args[1], _given(func, args, kwargs, "non_blocking"))
    if name == "aten::_to_copy":
        return _to_copy(func, args[0], kwargs)
    if name == "aten::_has_compatible_shallow_copy_type":
        return isinstance(args[0], Pretended) == isinstance(args[1], Pretended)
    wanted = _device_in(args, kwargs)
    device = wanted or (remote[0].device if remote else CPU)
    if remote:
        _check_places(func, name, args, tensors, remote)
        _note_waits(func, name, args, kwargs)
    plain_args, plain_kwargs = tree_map(_unwrap, (args, kwargs))
    if device.type == NAME and any(one.name == "generator" for one in func._schema.arguments):
        plain_kwargs["generator"] = _generator(_given(func, args, kwargs, "generator"), device)
    out = func(*plain_args, **plain_kwargs)
    return _wrap(func, name, args, kwargs, tensors, out, device)


def _wrap(
    func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], out: Any, device: Any
) -> Any:
    """Put the results of an operation on their device, and the operation into its queue."""
    own = [one for one in tensors if isinstance(one, Pretended)]
    storages = {one.elem.untyped_storage()._cdata: one.memory for one in own}
    written = [
        one.extent
        for argument, value in _with_schema(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for one in tree_leaves(value)
        if isinstance(one, Pretended)
    ]
    made: list[Extent] = []

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, Pretended):
            return value
        if (memory := storages.get(value.untyped_storage()._cdata)) is not None:
            return Pretended(value, CPU if memory.is_host else device, memory)
        if device.type == "cpu":
            made.append((Memory(0, is_host=True), (0, 0)))
            return value
        result = Pretended(value, device)
        made.append(result.extent)
        return result

    is_in_place = name.endswith("_") and not name.endswith("__")
    result = None if is_in_place or "out" in kwargs else tree_map(wrapped, out)
    is_launched = bool(made or written or name in _READS_VALUES) and name not in _METADATA
    if "empty" in name and not written:
        is_launched = False
    if is_launched and device.type == "cpu":
        host_uses([one.extent for one in own], is_write=False, what=f"{name} at {here()}")
        host_uses(written, is_write=True, what=f"{name} at {here()}")
    elif is_launched:
        launch([one.extent for one in own], [*made, *written], name)
    for one in own:
        assert one.elem.shape == one.shape or torch.Tag.inplace_view in func.tags, f"{name} resized"
    if is_in_place:
        if torch.Tag.inplace_view in func.tags:
            with no_dispatch():
                func(*args, **kwargs)
        return args[0]
    return kwargs.get("out", result)


def _check_places(func: Any, name: str, args: Any, tensors: list[Any], remote: list[Any]) -> None:
    """Raise where a device would: its kernels take numbers from the host, and no other tensors."""
    if name in ("aten::set_", "aten::record_stream"):
        return
    others = [
        one for one in tensors
        if one.device != remote[0].device
        and not (one.device.type == "cpu" and not one.ndim and torch.Tag.pointwise in func.tags)
    ]  # fmt: skip
    if name in _TAKES_CPU_INDICES and not (isinstance(args[0], Pretended) and args[0].is_on_host):
        indices = tree_leaves(args[1])
        if any(one is index for one in others for index in indices):
            REPORT.sync("index from the host")
            ORDER.current.synchronize()
        others = [o for o in others if o.ndim and not any(o is index for index in indices)]
    if others:
        REPORT.mismatch(f"{name}: {remote[0].device} and {others[0].device}")
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{remote[0].device} and {others[0].device}! ({name} at {here()})"
        )


def _note_waits(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Report an operation for whose result the host waits."""
    kind = _READS_VALUES.get(name)
    if name == "aten::repeat_interleave" and func._overloadname == "Tensor":
        kind = None if kwargs.get("output_size") is not None else "repeat_interleave"
    if name in _TAKES_CPU_INDICES and any(
        isinstance(one, Tensor) and one.dtype == torch.bool for one in tree_leaves(args[1])
    ):
        kind = "bool index"
    if kind is not None:
        REPORT.sync(kind)
        ORDER.current.synchronize()


def _copy(into: Any, source: Any, non_blocking: Any) -> Any:
    """`into.copy_(source)`, between the host and the device or on one of them."""
    _values(into).copy_(_values(source))
    _note_copy(into, source, bool(non_blocking))
    return into


def _note_copy(into: Any, source: Any, non_blocking: bool) -> None:
    is_to, is_from = _is_remote(into), _is_remote(source)
    own = {id(one): [one.extent] for one in (into, source) if isinstance(one, Pretended)}
    reads, writes = own.get(id(source), []), own.get(id(into), [])
    what = f"copy at {here()}"
    if not (is_to or is_from):
        host_uses(reads, is_write=False, what=what)
        host_uses(writes, is_write=True, what=what)
        return
    launch(reads, writes, what)
    if is_to and is_from:
        return
    pinned = source if is_to else into
    if non_blocking and isinstance(pinned, Pretended):
        REPORT.copy("pinned copy to device" if is_to else "pinned copy to host")
        return
    # a copy between a device and memory that is not pinned waits for what was queued before it
    REPORT.sync("copy to device" if is_to else "copy to host")
    ORDER.current.synchronize()


def _to_copy(func: Any, source: Any, kwargs: dict[str, Any]) -> Any:
    wanted = _device_in((), kwargs) or source.device
    given = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    value = func(_values(source), **given)
    non_blocking = bool(kwargs.get("non_blocking"))
    if wanted.type == NAME:
        made = Pretended(value, wanted)
        _note_copy(made, source, non_blocking)
        return made
    if non_blocking and _is_remote(source):  # torch pins what such a copy goes into
        pinned = Pretended(value, CPU)
        _note_copy(pinned, source, non_blocking)
        return pinned
    _note_copy(value, source, False)
    return value


def _is_remote(one: Any) -> bool:
    return isinstance(one, Pretended) and not one.is_on_host


def _values(one: Any) -> Any:
    return one.elem if isinstance(one, Pretended) else one


def _unwrap(one: Any) -> Any:
    return CPU if isinstance(one, torch.device) and one.type == NAME else _values(one)


def _device_in(args: Any, kwargs: Any) -> torch.device | None:
    """The device that an operation was asked for."""
    found = kwargs.get("device")
    if found is None:
        found = next((one for one in args if isinstance(one, torch.device)), None)
    return None if found is None else _numbered(torch.device(found))


def _numbered(device: torch.device) -> torch.device:
    is_open = device.type == NAME and device.index is None
    return torch.device(NAME, _current_index[0]) if is_open else device


def _with_schema(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args) and not argument.kwarg_only:
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _given(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    found = (value for argument, value in _with_schema(func, args, kwargs) if argument.name == name)
    return next(found, None)


def _generator(given: Any, device: torch.device) -> torch.Generator:
    own = GENERATORS[device.index or 0]
    if given is None or any(given is one for one in GENERATORS):
        return given or own
    raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")


GENERATORS = [torch.Generator() for _ in range(COUNT)]
_current_index = [0]
_plain: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in ("tensor", "as_tensor", "arange", "eye", "empty", "empty_like", "zeros")
}


def _tensor(data: Any, *, device: Any = None, **more: Any) -> Any:
    """`torch.tensor` makes it on the CPU, and copies it."""
    if isinstance(data, Pretended):
        return data.clone() if device is None else data.to(device)
    if isinstance(data, (list, tuple)):
        data = _numbers(data)
    made = _plain["tensor"](data, **({} if _is_ours(device) else {"device": device}), **more)
    return made.to(device) if _is_ours(device) else made


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
    if isinstance(data, Tensor):
        return data.to(device=device or data.device, dtype=dtype or data.dtype)
    if not _is_ours(device):
        return _plain["as_tensor"](data, dtype=dtype, device=device)
    return _plain["as_tensor"](data, dtype=dtype).to(device)


def _numbers(data: Any) -> Any:
    """Lists, whose tensors are read one by one."""
    if isinstance(data, (list, tuple)):
        return [_numbers(one) for one in data]
    return data.item() if isinstance(data, Pretended) and not data.ndim else data


def _resized(name: str) -> Callable[..., Any]:
    """A function whose kernel resizes an empty tensor, which wrappers do not notice."""

    def function(*bounds: Any, device: Any = None, **more: Any) -> Any:
        given = map(_numbers, bounds)
        if not _is_ours(device):
            return _plain[name](*given, **({} if device is None else {"device": device}), **more)
        made = Pretended(_plain[name](*given, **more), torch.device(device))
        launch([], [made.extent], name)
        return made

    return function


def _pinning(name: str) -> Callable[..., Any]:
    def function(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        made = _plain[name](*args, **kwargs)
        return Pretended(made, CPU) if pin_memory else made

    return function


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    pinned: Tensor = Pretended(self.clone(), CPU)
    return pinned


_plain_data: Any = torch._C.TensorBase.data


def _set_data(self: Tensor, value: Tensor) -> None:
    """`tensor.data = value` for tensors of one device and of two: it becomes the other one."""
    if not isinstance(self, Pretended) and not isinstance(value, Pretended):
        _plain_data.__set__(self, value)
        return
    made: Any = value.detach()
    if isinstance(self, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=False)
    swap: Any = torch.utils.swap_tensors
    swap(self, made)


def _is_ours(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == NAME


class _Module:
    """`torch.pretended`, as `torch.cuda`."""

    default_generators = GENERATORS

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return _current_index[0]

    def device_count(self) -> int:
        return COUNT

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        for generator in GENERATORS:
            generator.manual_seed(seed)

    def get_device_name(self, device: Any = None) -> str:
        return "a pretended device"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _set_index(device: Any) -> None:
    _current_index[0] = device if isinstance(device, int) else torch.device(device).index or 0


def install() -> None:
    """Register the device with this process, for good."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    _kept.append(library)  # a forgotten one is undone
    _device_constructors()  # remembers the plain functions that `with torch.device(...)` means
    patched: dict[str, Any] = {
        "tensor": _tensor, "as_tensor": _as_tensor, "Stream": Stream,
        "Event": Event,
    }  # fmt: skip
    patched |= {name: _pinning(name) for name in ("empty", "empty_like", "zeros")}
    patched |= {name: _resized(name) for name in ("arange", "eye")}
    for name, value in patched.items():
        setattr(torch, name, value)
    accelerator: dict[str, Any] = {
        "current_stream": lambda device=None: ORDER.current,
        "set_stream": lambda stream: setattr(ORDER, "current", stream), "synchronize": _synchronize,
        "device_count": lambda: COUNT, "current_device_index": lambda: _current_index[0],
        "set_device_index": _set_index, "memory_allocated": lambda device=None: MEMORY.taken,
        "memory_reserved": lambda device=None: MEMORY.taken,
        "max_memory_allocated": lambda device=None: MEMORY.peak,
        "reset_peak_memory_stats": lambda device=None: MEMORY.reset(),
        "get_memory_info": lambda device=None: (MEMORY.limit - MEMORY.taken, MEMORY.limit),
        "empty_cache": lambda: None,
    }  # fmt: skip
    for name, value in accelerator.items():
        setattr(torch.accelerator, name, value)
    Tensor.data = property(_plain_data.__get__, _set_data)  # type: ignore[assignment]
    Tensor.pin_memory = _pin_memory  # type: ignore[assignment,method-assign]


_kept: list[Any] = []


def _synchronize(device: Any = None) -> None:
    check_life()
    REPORT.sync("synchronize")
    ORDER.synchronize()
