"""The process-wide switches that a pipeline may turn, as they are now."""

import decimal
import gc
import locale
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_NOT_KEPT = {"PYTEST_CURRENT_TEST"}


def switches() -> dict[str, Any]:
    """Values by name; two of them are compared like two states of a pipeline."""
    function_modes: Any = _get_current_function_mode_stack
    attention: Any = torch.backends.cuda
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": str(torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "flash": attention.flash_sdp_enabled(),
        "math": attention.math_sdp_enabled(),
        "memory-efficient": attention.mem_efficient_sdp_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "function modes": len(function_modes()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "module hooks": len(torch.nn.modules.module._global_forward_hooks)
        + len(torch.nn.modules.module._global_forward_pre_hooks),
        "environment": sorted((k, v) for k, v in os.environ.items() if k not in _NOT_KEPT),
        "folder": os.getcwd(),
        "numpy errors": sorted(np.geterr().items()),
        "warnings": len(warnings.filters),
        "decimal": decimal.getcontext().prec,
        "locale": locale.setlocale(locale.LC_ALL),
        "recursion": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "collector": gc.isenabled(),
        "profile": sys.getprofile() is None and threading.getprofile() is None,
        "signal": signal.getsignal(signal.SIGUSR1),
        "names": [
            getattr(holder, name, None) is value for holder, name, value in _ORIGINALS
        ],  # of libraries, that engines replace while they run
    }


_HOLDERS = (torch, torch.Tensor, torch.nn.Module, torch.nn.functional, random, np.random)
_ORIGINALS = [
    (holder, name, value)
    for holder in _HOLDERS
    for name, value in list(vars(holder).items())
    if callable(value) and not isinstance(value, (staticmethod, classmethod))
]
