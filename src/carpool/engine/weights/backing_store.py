"""Where streamed weights are kept: pinned host memory, or a file on the disk.

The file has no name, so nothing of it is left when the process ends, however it ends.
"""

import ctypes
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from carpool.engine.weights.groups import BlockGroup
from carpool.engine.weights.residency import gib
from carpool.errors import LoadFailed

LEAST_PINNED = 1 << 20  # bytes
HOST_SHARE = 0.8  # of the host's free memory that streamed weights may take


class Store(Protocol):
    """Keeps the bytes of groups."""

    is_pinned: bool  # host memory that an accelerator copies from by itself

    def write(self, group: BlockGroup) -> None:
        """Keep the weights that a group has now."""
        ...

    def read(self, group: BlockGroup, into: Tensor) -> None:
        """Copy the bytes of a group. `into` is on the host, or on an accelerator if `is_pinned`."""
        ...

    def close(self) -> None: ...


class DiskStore:
    """A file without a name.

    Args:
        folder: on the disk that is to hold it.
        n_bytes: that will be written.

    Raises:
        LoadFailed: there is no room.
    """

    is_pinned = False

    def __init__(self, folder: Path, n_bytes: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < n_bytes:
                raise LoadFailed(
                    f"{folder} has {gib(free)} free, and weights of {gib(n_bytes)} are to be "
                    "streamed from it: name another folder (stream_dir)"
                )
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  until close
        except OSError as error:
            raise LoadFailed(f"weights cannot be streamed from {folder}: {error}") from error
        self._at: dict[BlockGroup, int] = {}
        self._end = 0

    def write(self, group: BlockGroup) -> None:
        for place in group.places:
            value = place.read()
            view, at = memoryview(place.flat(value).numpy().data), self._end + place.at
            while view:
                done = os.pwrite(self._file.fileno(), view, at)
                view, at = view[done:], at + done
            _forget_pages(value)
        self._at[group] = self._end
        self._end += group.n_bytes
        os.truncate(self._file.fileno(), self._end)

    def read(self, group: BlockGroup, into: Tensor) -> None:
        view, at = memoryview(into.numpy().data)[: group.n_bytes], self._at[group]
        while view:
            done = os.preadv(self._file.fileno(), [view], at)
            if not done:
                raise OSError("the file of streamed weights has been cut short")
            view, at = view[done:], at + done

    def close(self) -> None:
        self._file.close()


class PinnedStore:
    """Host memory that an accelerator copies from while the host goes on.

    Torch rounds what it pins up to powers of two, so a group is kept in pieces of such sizes.
    """

    is_pinned = True

    def __init__(self) -> None:
        self._pieces: dict[BlockGroup, list[Tensor]] = {}

    def write(self, group: BlockGroup) -> None:
        whole = torch.zeros(group.n_bytes, dtype=torch.uint8)
        for place in group.places:
            value = place.read()
            whole[place.at : place.at + place.n_bytes].copy_(place.flat(value))
            _forget_pages(value)
        self._pieces[group] = [
            host_buffer(end - begin).copy_(whole[begin:end])
            for begin, end in _pieces(group.n_bytes)
        ]

    def read(self, group: BlockGroup, into: Tensor) -> None:
        for (begin, end), piece in zip(_pieces(group.n_bytes), self._pieces[group], strict=True):
            into[begin:end].copy_(piece, non_blocking=True)

    def close(self) -> None:
        self._pieces.clear()


def host_buffer(n_bytes: int) -> Tensor:
    """Bytes of the host's memory to copy from: pinned, where this machine has such."""
    try:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # none of it for this kind of device: copies from it are waited for
        return torch.empty(n_bytes, dtype=torch.uint8)


def _pieces(n_bytes: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of pieces whose sizes are powers of two, but for a small last one."""
    begin = 0
    while begin < n_bytes:
        left = n_bytes - begin
        size = left if left <= LEAST_PINNED else 1 << (left.bit_length() - 1)
        yield begin, begin + size
        begin += size


def free_host_bytes() -> int:
    """Host memory that is free or can be freed at once."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # no Linux
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


_MADV_DONTNEED = 4  # of Linux


def _forget_pages(value: Tensor) -> None:
    """Let go of the memory that reading a weight out of its checkpoint has taken.

    Safetensors maps files into memory, and a page that was read counts as this process's until
    the whole file is let go of. Only whole pages of mapped files, and of this weight, are dropped:
    its values are in the store by now.
    """
    if value.device.type != "cpu" or not Path("/proc/self/maps").exists():
        return
    page = mmap.PAGESIZE
    begin = -(-value.data_ptr() // page) * page
    end = (value.data_ptr() + value.nbytes) // page * page
    if begin < end and _is_file(begin, end):
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED
        )


def _is_file(begin: int, end: int) -> bool:
    """Whether addresses belong to one mapping of a regular file."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, _, rest = line.partition(" ")
            low, high = (int(word, 16) for word in span.split("-"))
            if low <= begin and end <= high:
                return len(fields := rest.split(None, 4)) == 5 and fields[4].startswith("/")
    return False
