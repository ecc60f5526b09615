"""Journals of jobs on the disk: after a restart, jobs continue at their next step.

Each open job has a folder with a file for each request. Entries are appended with length and
checksum; a torn entry at the end, from a killed process, is cut off. Files are not flushed to the
device: after a power cut, steps run again. If the disk is nearly full, journals leave its space to
results. One thread reads and writes in order, so a slow disk never blocks the event
loop.
"""

import asyncio
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from carpool.errors import reason
from carpool.jobs.files import JobFolders
from carpool.types import JournalEntry

log = logging.getLogger("carpool")

_HEADER = struct.Struct("<II")  # length of the entry, CRC-32
_MOST_ENTRY_BYTES = 1 << 30
RESULTS_BYTES = 256 << 20  # reserved for results and database; on a small disk half of it
_decoder = msgspec.msgpack.Decoder(JournalEntry)


def results_bytes(disk_bytes: int) -> int:
    """Bytes of a disk of this size that journals leave free for results."""
    return min(RESULTS_BYTES, disk_bytes // 2)


def _room_bytes(stream: BinaryIO) -> int:
    """Bytes that journals may still use on a file's disk."""
    disk = os.fstatvfs(stream.fileno())
    return disk.f_bavail * disk.f_frsize - results_bytes(disk.f_blocks * disk.f_frsize)


class JournalMemory(Protocol):
    """The in-memory journals of running requests."""

    def open(self, request_id: str, past: list[JournalEntry], file: "JournalFile", /) -> None: ...
    def close(self, request_id: str, /) -> None: ...


class JobJournals:
    """The journals of the jobs of a store.

    Args:
        folders: the folders of the jobs' journals.
        memory: has the journals of running requests.
        most_bytes: limit for all files; later entries are dropped.
        room_bytes: returns the bytes that journals may still use on a file's disk.
    """

    def __init__(
        self,
        folders: JobFolders,
        memory: JournalMemory,
        most_bytes: int,
        room_bytes: Callable[[BinaryIO], int] = _room_bytes,
    ) -> None:
        self._folders, self._memory, self.most_bytes = folders, memory, most_bytes
        self.room_bytes = room_bytes
        self._thread = ThreadPoolExecutor(1, "carpool-journal")
        self.bytes = 0  # size of running requests' files
        self._was_told = False

    async def resume(self, job_id: str, part: int, request_id: str) -> None:
        """Continue a request where the job's last run stopped."""
        loop = asyncio.get_running_loop()
        path = self._folders.path(job_id) / f"{part}.journal"
        try:
            past, file = await loop.run_in_executor(self._thread, self._open, path)
        except OSError as error:
            self.warn(error)
            return
        self._memory.open(request_id, past, file)

    def leave(self, request_id: str) -> None:
        """Close the journal of a stopped request; its file stays until the job ends."""
        self._memory.close(request_id)

    def stop(self) -> None:
        """Write the remaining entries, and stop the thread."""
        self._thread.shutdown()

    def _open(self, path: Path) -> tuple[list[JournalEntry], "JournalFile"]:
        path.parent.mkdir(exist_ok=True)
        file = path.open("a+b")
        try:
            file.seek(0)
            past, end = list[JournalEntry](), 0
            for entry, entry_end in _entries(file):
                end = entry_end
                while past and past[-1].number >= entry.number:
                    past.pop()  # the request restarted from the beginning
                past.append(entry)
            file.truncate(end)
        except BaseException:
            file.close()
            raise
        self.bytes += end
        return past, JournalFile(self, file)

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        """Run work on the thread, after all earlier work."""
        with suppress(RuntimeError):  # the executor has stopped
            self._thread.submit(work, *args)

    def warn(self, error: OSError) -> None:
        if not self._was_told:
            self._was_told = True
            log.warning("steps of jobs are not stored and may run again: %s", reason(error))


class JournalFile:
    """The journal file of one request; its entries are also in memory. Never blocks."""

    def __init__(self, journals: JobJournals, stream: BinaryIO) -> None:
        self._journals, self._stream, self._is_broken = journals, stream, False

    def append(self, entry: JournalEntry) -> None:
        self._journals.submit(self._write, entry)

    def clear(self) -> None:
        self._journals.submit(self._write, None)

    def close(self) -> None:
        self._journals.submit(self._close)

    def _write(self, entry: JournalEntry | None) -> None:
        """Append an entry; None clears the file."""
        journals = self._journals
        if self._is_broken:
            return
        try:
            if entry is None:
                self._empty()
                return
            body = msgspec.msgpack.encode(entry)
            if journals.bytes + len(body) > journals.most_bytes:
                raise OSError(f"journals of jobs have {journals.bytes} bytes, a tenth of the limit")
            if journals.room_bytes(self._stream) < len(body):
                self._empty()
                raise OSError("the rest of the disk is reserved for results")
            self._stream.write(_HEADER.pack(len(body), zlib.crc32(body)) + body)
            self._stream.flush()
            journals.bytes += _HEADER.size + len(body)
        except OSError as error:
            self._is_broken = True  # the file is intact up to a torn end
            journals.warn(error)

    def _empty(self) -> None:
        self._journals.bytes -= self._stream.seek(0, 2)
        self._stream.truncate(0)

    def _close(self) -> None:
        with suppress(OSError):
            self._journals.bytes -= self._stream.seek(0, 2)
            self._stream.close()


def _entries(file: BinaryIO) -> Iterator[tuple[JournalEntry, int]]:
    """Yield the intact entries of a file, each with its end offset."""
    end = 0
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        length, checksum = _HEADER.unpack(header)
        if length > _MOST_ENTRY_BYTES or len(body := file.read(length)) < length:
            return
        if zlib.crc32(body) != checksum:
            return
        try:
            entry = _decoder.decode(body)
        except msgspec.DecodeError:
            return
        end += _HEADER.size + length
        yield entry, end
