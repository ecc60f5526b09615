"""Process-wide switches that user code may change, restored after each request.

One table lists them with their getters and setters. They are read when a request's code starts to
run; changed ones are restored when it pauses or ends. A shared request that changes a switch has to
ride privately: other requests would run with it, too.

Other threads see the changes of the running fiber, and their own changes at that time are taken for
the fiber's: so only requests with code outside the known libraries are watched.
"""

import gc
import locale
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.backends import mha, opt_einsum


class Turnable(NamedTuple):
    """A switch of the process.

    Attributes:
        get: returns its value, copied if it is mutable.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


class Switches:
    """The switches while one request runs. For the engine's thread.

    Attributes:
        turned: names of the switches changed so far.
    """

    def __init__(self) -> None:
        self._outside: list[Any] = []
        self.turned: dict[str, None] = {}

    def enter(self) -> None:
        self._outside = _values()

    def leave(self) -> None:
        values = _values()
        if turned := _differences(values, self._outside):
            self.turned.update(dict.fromkeys(TABLE[place].name for place in turned))
            _set({place: self._outside[place] for place in turned}, values)


def _values() -> list[Any]:
    try:
        return [get() for get in _GETS]
    except Exception:  # torch refuses to read some while others contradict them
        return [_value(get) for get in _GETS]


def of_torch() -> list[Any]:
    """The values of torch's own switches, which may change what a module computes."""
    return _values()[: len(_TORCH)]


def _value(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except Exception:
        return _UNKNOWN


def _differences(values: list[Any], references: list[Any]) -> dict[int, Any]:
    if values == references:
        return {}  # common case
    pairs = enumerate(zip(values, references, strict=True))
    return {place: value for place, (value, reference) in pairs if value != reference}


def _set(changes: dict[int, Any], values: list[Any]) -> None:
    """Set switches, given their current values."""
    target = [changes.get(place, value) for place, value in enumerate(values)]
    for _ in range(2):  # setting one may change another; the second round corrects that
        for place, value in _differences(target, _values()).items():
            if value is not _UNKNOWN:
                TABLE[place].set(value)


def _of_torch() -> Iterator[Turnable]:
    yield Turnable("default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Turnable("threads", torch.get_num_threads, torch.set_num_threads)
    yield Turnable(
        "deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch._C._set_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield Turnable(
        "anomalies",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    place = torch._GLOBAL_DEVICE_CONTEXT  # used by `set_default_device`
    yield Turnable(
        "default device",
        lambda: getattr(place, "device_context", None),
        partial(setattr, place, "device_context"),
    )
    yield Turnable("fast path of attention", mha.get_fastpath_enabled, mha.set_fastpath_enabled)
    printing = vars(torch._tensor_str.PRINT_OPTS)
    yield Turnable("print options", printing.copy, printing.update)
    if opt_einsum.is_available():
        einsum: Any = opt_einsum
        yield Turnable("einsum", lambda: einsum.enabled, partial(setattr, einsum, "enabled"))
        yield Turnable(
            "einsum order", lambda: einsum.strategy, partial(setattr, einsum, "strategy")
        )
    for device in _DEVICES:
        get, put = torch.get_autocast_dtype, torch.set_autocast_dtype
        yield Turnable(f"autocast on {device}", partial(get, device), partial(put, device))
    for name, getter, setter in _IN_C:
        if hasattr(torch._C, getter) and hasattr(torch._C, setter):
            set_c = partial(_set_in_c, getattr(torch._C, setter))
            yield Turnable(name, getattr(torch._C, getter), set_c)
    if hasattr(torch._C, "_get_fp32_precision_getter"):  # since torch 2.9
        for of in _PRECISIONS:
            get_, set_ = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
            yield Turnable(f"float32 in {' '.join(of)}", partial(get_, *of), partial(set_, *of))


def _of_python() -> Iterator[Turnable]:
    yield Turnable("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield Turnable("collector", gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable())
    yield Turnable("folder", os.getcwd, os.chdir)
    environment: Any = os.environ
    yield Turnable("environment", lambda: environment._data.copy(), _set_environment)
    every = locale.LC_ALL
    yield Turnable("locale", partial(locale.setlocale, every), partial(locale.setlocale, every))
    yield Turnable("filters of warnings", _filters, _set_filters)


def _set_in_c(setter: Callable[..., object], value: Any) -> None:
    if value is not None:  # None: the back end is missing
        setter(*value) if isinstance(value, tuple) else setter(value)


def _set_environment(variables: dict[Any, Any]) -> None:
    now: Any = getattr(os.environ, "_data", {})
    for name in now.keys() - variables.keys():
        del os.environ[os.fsdecode(name)]
    for name, value in variables.items():
        if now.get(name) != value:
            os.environ[os.fsdecode(name)] = os.fsdecode(value)


_SHOWN_BY = ("showwarning", "_showwarnmsg_impl")  # code that records warnings replaces these


def _filters() -> tuple[Any, ...]:
    functions = [getattr(warnings, name, None) for name in _SHOWN_BY]
    return _Same(warnings.filters), tuple(warnings.filters), *functions


def _set_filters(state: tuple[Any, ...]) -> None:
    filters: Any = state[0].value
    warnings.filters = filters
    warnings.resetwarnings()  # the only public way to report a change of filters
    filters[:] = state[1]
    for name, function in zip(_SHOWN_BY, state[2:], strict=True):
        if function is not None:
            setattr(warnings, name, function)


class _Same:
    """Equal if its value is the same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, candidate: object) -> bool:
        return isinstance(candidate, _Same) and self.value is candidate.value

    __hash__ = None  # type: ignore[assignment]


_UNKNOWN = object()
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_PRECISIONS = [
    ("generic", "all"),
    *((back_end, of) for back_end in ("cuda", "mkldnn") for of in ("all", "matmul", "conv", "rnn")),
]
_IN_C = [  # name, getter, setter
    ("precision of float32", "_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    ("TF32 of cuBLAS", "_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    ("TF32 of cuDNN", "_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    ("TF32 of oneDNN", "_get_onednn_allow_tf32", "_set_onednn_allow_tf32"),
    *(
        (f"{sums} of cuBLAS", f"_get_cublas_allow_{sums}", f"_set_cublas_allow_{sums}")
        for sums in (
            *("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction"),
            "fp16_accumulation",
        )
    ),
    (
        "float16 sums of the CPU",
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
    ),
    *(
        (f"{kernel} attention", f"_get_{kernel}_sdp_enabled", f"_set_sdp_use_{kernel}")
        for kernel in ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
    ),
    ("order of attention", "_get_sdp_priority_order", "_set_sdp_priority_order"),
    (
        "half sums of math attention",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
    ),
    *(
        (f"cuDNN {flag}", f"_get_cudnn_{flag}", f"_set_cudnn_{flag}")
        for flag in ("enabled", "benchmark", "deterministic")
    ),
    ("MIOpen", "_get_miopen_immediate", "_set_miopen_immediate"),
    ("oneDNN", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("deterministic oneDNN", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("NNPACK", "_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("library of linear algebra", "_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    ("library of matrices", "_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    ("engine of quantized operations", "_get_qengine", "_set_qengine"),
    (
        "uninitialized memory",
        "_get_deterministic_fill_uninitialized_memory",
        "_set_deterministic_fill_uninitialized_memory",
    ),
]
_TORCH = [*_of_torch()]
TABLE = [*_TORCH, *_of_python()]
_GETS = [switch.get for switch in TABLE]
