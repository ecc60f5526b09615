"""Find the bytes of memory-mapped weights in their files.

Safetensors maps files into memory. A weight whose pages were never written still equals its file,
so streaming reads it from the checkpoint again, without a copy.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from carpool.engine.weights.groups import is_dense
from carpool.engine.weights.sample import digest_of

_MADV_RANDOM, _MADV_DONTNEED = 1, 4  # Linux
_COMPARED_BYTES = 4096  # compared with the file, at both ends of a weight


@dataclass(frozen=True, slots=True)
class Mapping:
    """A part of a regular file mapped into this process's memory."""

    begin: int  # address
    end: int
    offset: int  # offset in the file, bytes
    path: str
    is_unchanged: bool  # none of it was written in memory


class MappedFiles:
    """The currently mapped files, and those that weights are read from.

    Empty on systems other than Linux.
    """

    def __init__(self) -> None:
        self._mappings = list(_mappings())
        self._files: dict[str, int] = {}
        self._stats: dict[int, os.stat_result] = {}
        self._digests: dict[int, str] = {}

    def place_of(self, value: Tensor) -> tuple[int, int] | None:
        """The descriptor and offset of a tensor's bytes in a file; None: no file holds them."""
        mapping = self._mapping_of(value)
        if mapping is None or not mapping.is_unchanged or not is_dense(value):
            return None
        file = self._open(mapping.path)
        offset = mapping.offset + value.data_ptr() - mapping.begin
        return (file, offset) if file >= 0 and _is_equal(value, file, offset) else None

    def check(self, file: int) -> None:
        """Raise OSError if a file was written since it was opened."""
        before, now = self._stats[file], os.fstat(file)
        if (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns):
            return
        if self._digests[file] != digest_of(Path(f"/proc/self/fd/{file}")):
            [path] = [path for path, descriptor in self._files.items() if descriptor == file]
            name = "/".join(Path(path).parts[-2:])
            raise OSError(f"{name} was written over while its weights are used: start again")
        self._stats[file] = now

    def check_all(self) -> None:
        """Raise OSError if any file was written since it was opened."""
        for file in list(self._stats):
            self.check(file)

    def read_by_page(self, value: Tensor) -> None:
        """Turn off read-ahead for a weight of which only samples are read in memory.

        Linux may read megabytes around each sample, and so the whole file.
        """
        self._advise(value, _MADV_RANDOM)

    def forget_pages(self, value: Tensor) -> None:
        """Release the memory used to read a weight from its file.

        A page that was read counts towards this process until the file is unmapped.
        """
        self._advise(value, _MADV_DONTNEED)

    def _advise(self, value: Tensor, advice: int) -> None:
        """Advise Linux on the pages that hold nothing but this weight."""
        if self._mapping_of(value) is None:
            return
        page = mmap.PAGESIZE
        begin = -(-value.data_ptr() // page) * page
        end = (value.data_ptr() + value.nbytes) // page * page
        if begin < end:
            size = ctypes.c_size_t(end - begin)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), size, advice)

    def close(self) -> None:
        for file in self._stats:
            os.close(file)
        self._stats.clear()
        self._files.clear()

    def _mapping_of(self, value: Tensor) -> Mapping | None:
        if value.device.type != "cpu":
            return None
        begin, end = value.data_ptr(), value.data_ptr() + value.nbytes
        return next((m for m in self._mappings if m.begin <= begin and end <= m.end), None)

    def _open(self, path: str) -> int:
        """The descriptor of a file; -1 if it cannot be opened."""
        if path not in self._files:
            try:
                name = _open_files()[path] if path.endswith(" (deleted)") else path
                self._files[path] = file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
                self._stats[file] = os.fstat(file)
                self._digests[file] = digest_of(Path(f"/proc/self/fd/{file}"))
            except (OSError, LookupError):  # deleted or replaced
                self._files[path] = -1
        return self._files[path]


def _open_files() -> dict[str, str]:
    """This process's open files: names in /proc by path; a mapping keeps its file open."""
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {os.readlink(name): name for name in names if os.path.islink(name)}


def _mappings() -> Iterator[Mapping]:
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return
    head: list[str] = []
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # "begin-end rights offset device inode path"
            head = line.split(None, 5)
        elif name == "Anonymous:" and len(head) == 6 and head[5].startswith("/"):
            begin, end = (int(word, 16) for word in head[0].split("-"))
            is_unchanged = int(rest.split()[0]) == 0
            yield Mapping(begin, end, int(head[2], 16), head[5], is_unchanged)


def _is_equal(value: Tensor, file: int, offset: int) -> bool:
    """Whether both ends of a weight equal the file: its path may now name another file."""
    flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
    data = memoryview(flat.numpy().data)
    ends = {0, max(0, len(data) - _COMPARED_BYTES)}
    return all(
        os.pread(file, len(part := data[at : at + _COMPARED_BYTES]), offset + at) == part
        for at in ends
    )
