"""The device an engine runs on: a CPU, or what `torch.accelerator` knows: CUDA, ROCm, XPU, MPS.

Work is queued on an accelerator and runs while Python goes on. Streams and events say what has
happened there. A kind of accelerator that has no events is waited for after every forward, and
one that has no streams copies in its only one: slower, and just as right.
"""

import functools
import logging
import os
import resource
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from carpool.config import DEVICES, EngineSettings
from carpool.errors import SettingRejected
from carpool.preparation import ALL, types

log = logging.getLogger("carpool")

SMALL_MODEL_PARAMETERS = 500_000_000


class DeviceLost(BaseException):
    """The device has failed for good: nothing runs on it in this process any more.

    No `except Exception` holds it up on its way out of the engine's loop.
    """


class Device:
    """A torch device and the number type that weights have on it.

    Args:
        settings: their `device` is a name, or "auto".
        at: where a given pipeline already is: then "auto" means there.

    Raises:
        SettingRejected: the device does not exist here.
    """

    def __init__(self, settings: EngineSettings, at: torch.device | None = None) -> None:
        self.torch = _find(settings.device, at)
        self.type = self.torch.type
        auto = "bfloat16" if self.is_accelerator else "float32"
        self.dtypes: dict[str, torch.dtype] = {
            component: getattr(torch, auto if name == "auto" else name)
            for component, name in {ALL: "auto", **types(settings.dtype)}.items()
        }  # of weights, by component
        self.dtype: torch.dtype = self.dtypes[ALL]
        self._threads = settings.threads
        self._ahead: deque[torch.Event] = deque()
        self._copies: torch.Stream | None = None
        self.is_lost = False
        self.at_loss: Callable[[], None] = lambda: None  # a worker process ends there

    @property
    def is_accelerator(self) -> bool:
        """Whether work is queued on it, and over some time after it was launched."""
        return self.type != "cpu"

    @functools.cached_property
    def has_events(self) -> bool:
        """Whether moments in its queue of work can be marked, waited for and timed."""
        if not self.is_accelerator:
            return False
        try:
            began, ended = self._event(timed=True), self._event(timed=True)
            began.record()
            ended.record()
            ended.synchronize()
            began.elapsed_time(ended)
        except (RuntimeError, AttributeError) as error:
            log.warning(
                "%s has no events here (%s): every forward is waited for before the next one is "
                "prepared", self.torch, error,
            )  # fmt: skip
            return False
        return True

    @property
    def name(self) -> str:
        """What kind of device it is, as its maker calls it."""
        named = getattr(torch.get_device_module(self.torch), "get_device_name", None)
        return self.type if named is None or not self.is_accelerator else str(named(self.torch))

    def dtype_of(self, component: str) -> torch.dtype:
        """The number type of a component's weights."""
        return self.dtypes.get(component, self.dtype)

    def enter(self, parameters: int) -> None:
        """Set up the calling thread for a model of so many parameters.

        Threads that wait for each other spin: on two busy cores a second thread made an image of
        a tiny model 70 times slower. So a small model gets one.
        """
        if self.is_accelerator:
            if self.torch.index is not None:
                torch.accelerator.set_device_index(self.torch)
        elif self._threads or "OMP_NUM_THREADS" not in os.environ:
            small = parameters < SMALL_MODEL_PARAMETERS
            torch.set_num_threads(self._threads or (1 if small else len(os.sched_getaffinity(0))))

    def launched(self) -> None:
        """Note that a forward was launched, and wait for the one before it.

        So Python prepares one forward while the device runs another, but never two: a newcomer
        is at most one forward late. On a CPU forwards are over when they return, and a device
        without events is waited for.
        """
        event = self.mark()
        if event is None:
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
        """Wait for all that was queued. Raises what the device has failed with, if it did."""
        if self.is_accelerator:
            torch.accelerator.synchronize(self.torch)

    def check(self, error: Exception) -> None:
        """Find out whether an error was of one call only, or whether the device is lost.

        After an illegal memory access, say, a device answers every later call with an error.

        Args:
            error: that a forward, or a pipeline, has raised; no device raises one that is not a
                `RuntimeError`.

        Raises:
            DeviceLost: nothing will run on it any more. `at_loss` is called before.
        """
        is_suspect = isinstance(error, RuntimeError) and not isinstance(
            error, torch.OutOfMemoryError
        )
        if not self.is_accelerator or not is_suspect:
            return
        if not self.is_lost:
            try:
                self.synchronize()
                return
            except RuntimeError as lost:
                log.critical("%s has failed, and this process with it: %s", self.torch, lost)
            self.is_lost = True
            self.at_loss()
        raise DeviceLost(f"{self.torch} has failed: {error}")

    def stream(self) -> torch.Stream | None:
        """A new queue of work beside the present one; None where there can be only one."""
        return stream_of(self.torch)

    def mark(self) -> torch.Event | None:
        """This moment in the device's queue of work; None where it cannot be marked."""
        if self.is_lost or not self.has_events:
            return None
        event = self._event()
        event.record()
        return event

    def _event(self, *, timed: bool = False) -> torch.Event:
        return torch.Event(self.torch, enable_timing=timed)

    def to_host(self, value: torch.Tensor, *, mark: torch.Event | None) -> torch.Tensor:
        """Copy to host memory, waiting for the work before `mark` but for none after it."""
        if not self.is_accelerator or value.device.type == "cpu":
            return value
        if mark is None:
            return value.cpu()
        if self._copies is None:
            self._copies = self.stream()
        if self._copies is None:
            return value.cpu()
        self._copies.wait_event(mark)
        with self._copies:
            return value.cpu()

    # Memory: of this process, in bytes

    def peak_bytes(self) -> int:
        """The most memory that was in use at once, of this process on this device."""
        if self.is_accelerator:
            return self._memory("max_memory_allocated") or 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def free_bytes(self) -> int | None:
        """Memory that is free now: of the device, or of the machine; None where it is not known."""
        if self.is_accelerator:
            found = self._memory("get_memory_info")
            return None if found is None else int(found[0])
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):  # macOS does not say
            return None

    def reset_peak(self) -> None:
        """Let `peak_bytes` begin anew; on a CPU it cannot."""
        if self.is_accelerator:
            self._memory("reset_peak_memory_stats")

    @property
    def allocated_bytes(self) -> int | None:
        """Memory that tensors take; None on a CPU and where the device does not tell."""
        taken: int | None = self._memory("memory_allocated")
        return taken

    @property
    def reserved_bytes(self) -> int | None:
        """Memory that torch holds, in use or not; None where the device does not tell."""
        held: int | None = self._memory("memory_reserved")
        return held

    @property
    def memory_gib(self) -> float | None:
        """All of the device's memory; None on a CPU, whose memory is everybody's."""
        if self.type == "mps":
            return torch.mps.recommended_max_memory() / 2**30
        found = self._memory("get_memory_info")
        return None if found is None else found[1] / 2**30

    def free(self) -> None:
        """Give cached memory back to the device."""
        if self.is_accelerator:
            self._memory("empty_cache", is_asked=False)

    def _memory(self, name: str, *, is_asked: bool = True) -> Any:
        """Ask `torch.accelerator`; None where this kind of device has no such figure."""
        if not self.is_accelerator:
            return None
        try:
            return getattr(torch.accelerator, name)(*([self.torch] if is_asked else []))
        except (RuntimeError, AttributeError, NotImplementedError):
            return None


def _find(name: str, at: torch.device | None) -> torch.device:
    """The device of a setting."""
    if at is not None and name != "auto":
        said = _find(name, None)
        if (said.type, said.index or 0) != (at.type, at.index or 0):
            raise SettingRejected(
                f"device={name!r}: the pipeline given is on {at}; move it there first, with its "
                "to(), or leave the setting out"
            )
        return at
    known = torch.accelerator.current_accelerator()  # that this torch was built for
    here = known if known is not None and torch.accelerator.is_available() else None
    if name == "auto":
        return at or here or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in (*DEVICES, *([known.type] if known else [])):
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


def stream_of(device: torch.device) -> torch.Stream | None:
    """A new queue of work of a device; None on a CPU, and where a device has only one."""
    if device.type == "cpu":
        return None
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return None


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run work of a side thread in a stream of its own, and wait for it, not for the engine's."""
    stream = stream_of(device)
    if stream is None:
        yield
        return
    with stream:
        yield
    stream.synchronize()


def default_generators(device: torch.device | None = None) -> list[torch.Generator]:
    """The global random generators of accelerators: that of `device`, or of all."""
    kind = device or torch.accelerator.current_accelerator()
    if kind is None or kind.type == "cpu" or not torch.accelerator.is_available():
        return []
    if kind.type == "mps":
        return [torch.mps._get_default_mps_generator()]
    found = list(getattr(torch.get_device_module(kind), "default_generators", ()))
    if device is None or not found:
        return found
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return [found[index]]


Laps = list[torch.Event]
"""When a forward began, paused, went on, ... and ended, in its device's queue of work."""


class Stopwatch:
    """What forwards take on the device: on accelerators by events, read once they are over."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._laps: Laps | None = None  # of the forward that is being launched
        self._running: deque[tuple[Any, Laps]] = deque()
        self._over: list[tuple[Any, float]] = []

    def start(self) -> None:
        if self._device.has_events:
            self._laps = [self._now()]

    def swap(self, laps: Laps | None) -> Laps | None:
        """Pause the present forward, and go on with another one; None: with none.

        Forwards that share a sweep over streamed weights take turns: see `sweep.py`.

        Returns:
            what goes on with the present one.
        """
        before, self._laps = self._laps, laps
        for one in (before, laps):
            if one is not None:
                one.append(self._now())
        return before

    def stop(self, note: Any, host_s: float) -> None:
        """Note that a forward was launched.

        Args:
            note: comes back with its seconds, pauses left out.
            host_s: what it took on the host, which is all of it where there are no events.
        """
        if self._laps is None:
            self._over.append((note, host_s))
            return
        self._laps.append(self._now())
        self._running.append((note, self._laps))
        self._laps = None
        while self._running and self._running[0][1][-1].query():
            note, laps = self._running.popleft()
            turns = zip(laps[::2], laps[1::2], strict=True)
            self._over.append((note, sum(a.elapsed_time(b) for a, b in turns) / 1000))

    def _now(self) -> torch.Event:
        event = self._device._event(timed=True)
        event.record()
        return event

    def read(self) -> list[tuple[Any, float]]:
        """Notes and seconds of the forwards that are over, each once."""
        over, self._over = self._over, []
        return over
