"""The device of an engine: a CPU, or one known to `torch.accelerator`: CUDA, ROCm, XPU, MPS.

Work is queued on an accelerator and runs while Python continues. Streams and events report its
progress. An accelerator without events is synchronized after every forward, and one without extra
streams copies in its only one: slower, but correct.
"""

import functools
import logging
import os
import resource
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

import torch

from carpool.config import EngineSettings
from carpool.engine.containment import EngineLost
from carpool.engine.streams import stream_of, why_no_events
from carpool.errors import SettingRejected
from carpool.settings.engine import DEVICES
from carpool.settings.preparation import types
from carpool.settings.rules import DEFAULT

log = logging.getLogger("carpool")

SMALL_MODEL_PARAMETERS = 500_000_000


class DeviceLost(EngineLost):
    """The device has failed permanently: this process can no longer use it."""


class Device:
    """A torch device and the dtypes of weights on it.

    Args:
        settings: `device` is a name, or "auto".
        at: the device of a given pipeline, for "auto".

    Raises:
        SettingRejected: the device does not exist here.
    """

    def __init__(self, settings: EngineSettings, at: torch.device | None = None) -> None:
        self.torch = _find(settings.device, at)
        self.type = self.torch.type
        auto = "bfloat16" if self.is_accelerator else "float32"
        self.dtypes: dict[str, torch.dtype] = {
            component: getattr(torch, auto if name == "auto" else name)
            for component, name in {DEFAULT: "auto", **types(settings.dtype)}.items()
        }  # dtypes of weights, by component
        self.dtype: torch.dtype = self.dtypes[DEFAULT]
        self._threads = settings.threads
        self._ahead: deque[torch.Event] = deque()
        self.is_lost = False
        self.at_loss: Callable[[], None] = lambda: None  # a worker process exits there

    @property
    def is_accelerator(self) -> bool:
        """Whether work is queued on it and runs asynchronously."""
        return self.type != "cpu"

    @functools.cached_property
    def has_events(self) -> bool:
        """Whether it supports timed events."""
        why = why_no_events(self.torch)
        if why and self.is_accelerator:
            log.warning(
                "%s has no events here (%s): every forward is waited for before the next one is "
                "prepared", self.torch, why,
            )  # fmt: skip
        return not why

    @functools.cached_property
    def _copies(self) -> torch.Stream | None:
        return stream_of(self.torch)

    @property
    def name(self) -> str:
        """The vendor's name of the device."""
        named = getattr(torch.get_device_module(self.torch), "get_device_name", None)
        return self.type if named is None or not self.is_accelerator else str(named(self.torch))

    def dtype_of(self, component: str) -> torch.dtype:
        """The dtype of a component's weights."""
        return self.dtypes.get(component, self.dtype)

    def enter(self, parameters: int) -> None:
        """Set up the calling thread for a model of `parameters` parameters.

        Threads that wait for each other spin: on two busy cores a second thread made an image of
        a tiny model 70 times slower. So a small model gets one thread.
        """
        if self.is_accelerator:
            if self.torch.index is not None:
                torch.accelerator.set_device_index(self.torch)
        elif self._threads or "OMP_NUM_THREADS" not in os.environ:
            small = parameters < SMALL_MODEL_PARAMETERS
            torch.set_num_threads(self._threads or (1 if small else len(os.sched_getaffinity(0))))

    def launched(self) -> None:
        """Record the launch of a forward, and wait for the previous one.

        So Python prepares one forward while the device runs another, but never two: a new request
        is at most one forward late. On a CPU forwards end before they return, and a device without
        events is synchronized.
        """
        if (event := self.mark()) is None:
            self.synchronize()
            return
        self._ahead.append(event)
        if len(self._ahead) > 1:
            self._ahead.popleft().synchronize()

    @property
    def runs_ahead(self) -> bool:
        """Whether a forward may still be running when the next one is prepared."""
        return self.has_events

    def synchronize(self) -> None:
        """Wait for all queued work. Raises the device's error, if it has failed."""
        if self.is_accelerator:
            torch.accelerator.synchronize(self.torch)

    def check(self, error: Exception) -> None:
        """Find out whether an error concerns one call only, or the device is lost.

        For example, after an illegal memory access a device fails every later call.

        Args:
            error: the exception of a forward or a pipeline; devices raise only
                `RuntimeError`s.

        Raises:
            DeviceLost: the device is unusable. `at_loss` is called before.
        """
        is_short = isinstance(error, torch.OutOfMemoryError)
        if not self.is_accelerator or is_short or not isinstance(error, RuntimeError):
            return
        if not self.is_lost:
            try:
                self.synchronize()
                return
            except RuntimeError as failure:
                log.critical("%s has failed, and this process with it: %s", self.torch, failure)
            self.is_lost = True
            self.at_loss()
        raise DeviceLost(f"{self.torch} has failed: {error}")

    def mark(self) -> torch.Event | None:
        """An event at the current end of the device's queue; None without events."""
        if self.is_lost or not self.has_events:
            return None
        event = torch.Event(self.torch)
        event.record()
        return event

    def timed_event(self) -> torch.Event:
        """A timed event; only on devices with events."""
        return torch.Event(self.torch, enable_timing=True)

    def to_host(
        self,
        value: torch.Tensor,
        convert: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
        *,
        mark: torch.Event | None,
    ) -> torch.Tensor:
        """Copy to host memory, after the work before `mark`, without waiting for later work.

        Args:
            convert: runs on the device before the copy: bytes take a quarter of the size of floats.
        """
        if value.device.type == "cpu" or mark is None or self._copies is None:
            return convert(value).cpu()
        self._copies.wait_event(mark)
        with self._copies:
            converted = convert(value)
            self._copies.synchronize()  # a copy to pageable memory would block launches meanwhile
            return converted.cpu()

    # Memory: of this process, in bytes

    def peak_bytes(self) -> int:
        """Peak memory use of this process on this device."""
        if self.is_accelerator:
            return self._memory("max_memory_allocated") or 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def free_bytes(self) -> int | None:
        """Free memory of the device or of the machine; None: unknown."""
        if self.is_accelerator:
            memory = self._memory("get_memory_info")
            return None if memory is None else int(memory[0])
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):  # macOS does not report it
            return None

    def reset_peak(self) -> None:
        """Reset `peak_bytes`; not possible on a CPU."""
        if self.is_accelerator:
            self._memory("reset_peak_memory_stats")

    @property
    def allocated_bytes(self) -> int | None:
        """Memory in use by tensors; None on a CPU, or if the device does not report it."""
        allocated: int | None = self._memory("memory_allocated")
        return allocated

    @property
    def reserved_bytes(self) -> int | None:
        """Memory reserved by torch; None on a CPU, or if the device does not report it."""
        reserved: int | None = self._memory("memory_reserved")
        return reserved

    @property
    def memory_gib(self) -> float | None:
        """Total memory of the device; None on a CPU, which shares its memory."""
        if self.type == "mps":
            return torch.mps.recommended_max_memory() / 2**30
        memory = self._memory("get_memory_info")
        return None if memory is None else memory[1] / 2**30

    @property
    def all_bytes(self) -> float:
        """Total memory of the device or of the machine; infinite if unknown."""
        if self.is_accelerator:
            return inf if self.memory_gib is None else self.memory_gib * 2**30
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def free(self) -> None:
        """Release cached memory of the device."""
        if self.is_accelerator:
            self._memory("empty_cache", is_asked=False)

    def _memory(self, name: str, *, is_asked: bool = True) -> Any:
        """Call a memory function of `torch.accelerator`; None if it is not supported."""
        if not self.is_accelerator:
            return None
        try:
            return getattr(torch.accelerator, name)(*([self.torch] if is_asked else []))
        except (RuntimeError, AttributeError, NotImplementedError):
            return None


def _find(name: str, at: torch.device | None) -> torch.device:
    """The device for a setting."""
    if at is not None and name != "auto":
        place = _find(name, None)
        if (place.type, place.index or 0) != (at.type, at.index or 0):
            raise SettingRejected(
                f"device={name!r}: the pipeline given is on {at}; move it there first, with its "
                "to(), or leave the setting out"
            )
        return at
    accelerator = torch.accelerator.current_accelerator()  # the kind this torch was built for
    here = accelerator if accelerator is not None and torch.accelerator.is_available() else None
    if name == "auto":
        return at or here or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    names = (*DEVICES, accelerator.type) if accelerator else DEVICES
    if device is None or device.type not in names:
        raise SettingRejected(f"device={name!r}: must be auto, {', '.join(DEVICES)}, or cuda:N")
    if device.type == "cpu":
        return device
    if here is None or here.type != device.type:
        raise SettingRejected(
            f"device={name!r}: torch {torch.__version__} finds no {device.type.upper()} here; "
            f"what it finds is {here or 'a CPU only: device=cpu'}"
        )
    if (device.index or 0) >= (count := torch.accelerator.device_count()):
        raise SettingRejected(
            f"device={name!r}: there are {count} such devices here, {here.type}:0 to "
            f"{here.type}:{count - 1}"
        )
    return device
