"""The device an engine runs on: number type, threads, memory, and how far to run ahead."""

import os
import resource
from collections import deque
from typing import Any

import torch

from carpool.config import EngineSettings
from carpool.errors import SettingRejected
from carpool.preparation import ALL, types

SMALL_MODEL_PARAMETERS = 500_000_000


class Device:
    """A torch device and the number type that weights have on it.

    Raises:
        SettingRejected: the device does not exist here.
    """

    def __init__(self, settings: EngineSettings) -> None:
        name = settings.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.torch = torch.device(name)
        except RuntimeError:
            raise SettingRejected(f"device={name!r}: must be cpu, cuda or cuda:N") from None
        if self.torch.type not in ("cpu", "cuda"):
            raise SettingRejected(f"device={name!r}: must be cpu, cuda or cuda:N")
        if self.is_cuda and not torch.cuda.is_available():
            raise SettingRejected(f"device={name!r}: torch {torch.__version__} finds no CUDA here")
        auto = "bfloat16" if self.is_cuda else "float32"
        self.dtypes: dict[str, torch.dtype] = {
            component: getattr(torch, auto if name == "auto" else name)
            for component, name in {ALL: "auto", **types(settings.dtype)}.items()
        }  # of weights, by component
        self.dtype: torch.dtype = self.dtypes[ALL]
        self._threads = settings.threads
        self._ahead: deque[torch.cuda.Event] = deque()
        self._copies: torch.cuda.Stream | None = None

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    def dtype_of(self, component: str) -> torch.dtype:
        """The number type of a component's weights."""
        return self.dtypes.get(component, self.dtype)

    def enter(self, parameters: int) -> None:
        """Set up the calling thread for a model of so many parameters.

        Threads that wait for each other spin: on two busy cores a second thread made an image of
        a tiny model 70 times slower. So a small model gets one.
        """
        if self.is_cuda:
            if self.torch.index is not None:  # torch refuses a device without a number
                torch.cuda.set_device(self.torch)
        elif self._threads or "OMP_NUM_THREADS" not in os.environ:
            small = parameters < SMALL_MODEL_PARAMETERS
            torch.set_num_threads(self._threads or (1 if small else len(os.sched_getaffinity(0))))

    def launched(self) -> None:
        """Note that a forward was launched, and wait for the one before it.

        So Python prepares one forward while the device runs another, but never two: a newcomer
        is at most one forward late. On a CPU forwards are over when they return.
        """
        event = self.mark()
        if event is None:
            return
        self._ahead.append(event)
        if len(self._ahead) > 1:
            self._ahead.popleft().synchronize()

    def peak_bytes(self) -> int:
        """The most memory that was in use at once, of this process on this device."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.torch)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def free_bytes(self) -> int | None:
        """Memory that is free now: of the GPU, or of the machine; None where it is not known."""
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.torch)[0]
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):  # macOS does not say
            return None

    @property
    def memory_gib(self) -> float | None:
        """All of the device's memory; None on a CPU, whose memory is everybody's."""
        if not self.is_cuda:
            return None
        return torch.cuda.get_device_properties(self.torch).total_memory / 2**30

    def mark(self) -> torch.cuda.Event | None:
        """This moment in the device's queue of work; None where there is no such queue."""
        if not self.is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def to_host(self, value: torch.Tensor, *, mark: torch.cuda.Event | None) -> torch.Tensor:
        """Copy to host memory, waiting for the work before `mark` but for none after it."""
        if mark is None:
            return value
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]
        self._copies.wait_event(mark)
        with torch.cuda.stream(self._copies):
            return value.cpu()

    def free(self) -> None:
        """Give cached memory back to the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()


class Stopwatch:
    """What forwards take on the device: on CUDA by events, which are read once they are over."""

    def __init__(self, device: Device) -> None:
        self._is_cuda = device.is_cuda
        self._began: torch.cuda.Event | None = None
        self._running: deque[tuple[Any, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._over: list[tuple[Any, float]] = []

    def start(self) -> None:
        if self._is_cuda:
            self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._began.record()

    def stop(self, note: Any, host_s: float) -> None:
        """Note that a forward was launched.

        Args:
            note: comes back with its seconds.
            host_s: what it took on the host, which is all of it on a CPU.
        """
        if self._began is None:
            self._over.append((note, host_s))
            return
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended.record()
        self._running.append((note, self._began, ended))
        while self._running and self._running[0][2].query():  # type: ignore[no-untyped-call]
            note, began, ended = self._running.popleft()
            self._over.append((note, began.elapsed_time(ended) / 1000))

    def read(self) -> list[tuple[Any, float]]:
        """Notes and seconds of the forwards that are over, each once."""
        over, self._over = self._over, []
        return over
