"""The backing store of streamed weights: pinned host memory, or files on disk.

Weights that the checkpoint stores in the form used are read from its files. The others are written
to an unnamed file, so that nothing is left on disk however the process ends.
"""

import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from carpool.engine.weights.groups import BlockGroup, aligned, is_dense
from carpool.engine.weights.mapped_files import MappedFiles
from carpool.engine.weights.residency import gib
from carpool.errors import LoadFailed

LEAST_PINNED = 1 << 20  # bytes
PIECE_BYTES = 1 << 30  # mapped at once; half as much takes twice as many file descriptors
HOST_SHARE = 0.8  # share of the host's free memory for streamed weights


class Store(Protocol):
    """Stores the bytes of groups."""

    is_pinned: bool  # host memory that an accelerator can copy from asynchronously
    source: str  # description for logs

    def write(self, group: BlockGroup) -> None:
        """Store the current weights of a group."""
        ...

    def read(self, group: BlockGroup, into: Tensor) -> None:
        """Copy the bytes of a group. `into` is on the host, or on an accelerator if `is_pinned`."""
        ...

    def close(self) -> None: ...


class DiskStore:
    """An unnamed file, and the files that weights are mapped from.

    Args:
        folder: for the file, on the disk to use.
        n_bytes: bytes to write.
        mapped: files whose weights are not copied. Default: copy all weights.

    Raises:
        LoadFailed: the disk has too little space.
    """

    is_pinned = False

    def __init__(self, folder: Path, n_bytes: int, mapped: MappedFiles | None = None) -> None:
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
        fresh_file = f"a file of {gib(n_bytes)}"
        self.source = fresh_file if mapped is None else "mapped files"
        if mapped is not None and n_bytes:
            self.source += f" and {fresh_file}"
        self._mapped, self._pages = mapped, mapped or MappedFiles()
        self._pieces: dict[BlockGroup, list[_Piece]] = {}
        self._end = self._mapped_end = 0
        self._piece: Any = b""  # the last mapped one
        self._lock = threading.Lock()  # diffusers may read the files of a model in parallel

    def write(self, group: BlockGroup) -> None:
        pieces = []
        for place in group.places:
            value = place.read()
            is_as_stored = value.stride() == place.stride
            source = self._mapped.place_of(value) if self._mapped and is_as_stored else None
            if source is None:
                source = self._file.fileno(), self._end
                _write(memoryview(place.flat(value).numpy().data), *source)
                self._end += place.n_bytes
            pieces.append(_Piece(place.at, place.n_bytes, *source))
            self._pages.forget_pages(value)
        self._pieces[group] = pieces

    def move(self, value: Tensor) -> Tensor:
        """Write a tensor; returns it as mapped from the file, for as long as it is used."""
        if not value.nbytes:
            return value
        value = value if is_dense(value) else value.contiguous()
        data = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
        with self._lock:
            if self._end + len(data) > self._mapped_end:
                self._end = self._mapped_end
                size = -(-max(len(data), PIECE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
                self._mapped_end += size
                self._file.truncate(self._mapped_end)
                self._piece = mmap.mmap(self._file.fileno(), size, offset=self._end)
            at = self._end - (self._mapped_end - len(self._piece))
            _write(memoryview(data.numpy().data), self._file.fileno(), self._end)
            self._end += aligned(len(data))
            moved = torch.frombuffer(self._piece, dtype=torch.uint8, count=len(data), offset=at)
        return moved.view(value.dtype).as_strided(value.shape, value.stride())

    def read(self, group: BlockGroup, into: Tensor) -> None:
        whole = memoryview(into.numpy().data)
        for piece in self._pieces[group]:
            if piece.file != self._file.fileno():
                assert self._mapped is not None
                self._mapped.check(piece.file)
            view, offset = whole[piece.at : piece.at + piece.n_bytes], piece.offset
            while view:
                count = os.preadv(piece.file, [view], offset)
                if not count:
                    raise OSError("the file of streamed weights has been cut short")
                view, offset = view[count:], offset + count

    def close(self) -> None:
        self._file.close()
        if self._mapped is not None:
            self._mapped.close()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a group's bytes, and its place on disk."""

    at: int  # offset in the group
    n_bytes: int
    file: int  # descriptor
    offset: int


def _write(view: memoryview, file: int, offset: int) -> None:
    while view:
        try:
            count = os.pwrite(file, view, offset)
        except OSError as error:
            raise LoadFailed(f"weights cannot be written: {error}: another stream_dir?") from error
        view, offset = view[count:], offset + count


class PinnedStore:
    """Host memory from which an accelerator copies asynchronously.

    Torch rounds pinned sizes up to powers of two, so a group is stored in pieces of such sizes.
    """

    is_pinned = True
    source = "pinned memory"

    def __init__(self) -> None:
        self._pieces: dict[BlockGroup, list[Tensor]] = {}
        self._pages = MappedFiles()

    def write(self, group: BlockGroup) -> None:
        whole = torch.zeros(group.n_bytes, dtype=torch.uint8)
        for place in group.places:
            value = place.read()
            whole[place.at : place.at + place.n_bytes].copy_(place.flat(value))
            self._pages.forget_pages(value)
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
    """Host memory to copy from, pinned if this machine supports it."""
    try:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # not supported for this kind of device: its copies block
        return torch.empty(n_bytes, dtype=torch.uint8)


def _pieces(n_bytes: int) -> Iterator[tuple[int, int]]:
    """Bounds of pieces whose sizes are powers of two, except for a small last one."""
    begin = 0
    while begin < n_bytes:
        rest = n_bytes - begin
        size = rest if rest <= LEAST_PINNED else 1 << (rest.bit_length() - 1)
        yield begin, begin + size
        begin += size


def free_host_bytes() -> int:
    """Available host memory: free, or freed on demand."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
