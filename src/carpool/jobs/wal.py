"""Check a write-ahead log before SQLite reads it: it silently drops all that follows a bad frame.

A log that a crash has cut off ends within one transaction, which nobody was told of. Where commits
follow an unreadable frame, the file was damaged afterwards, and these commits were acknowledged.

Source: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

import struct
from pathlib import Path

_HEADER, _FRAME = 32, 24  # bytes before the first frame, and before the page of each
_LITTLE_ENDIAN, _BIG_ENDIAN = 0x377F0682, 0x377F0683  # how the words of checksums are read
_MASK = 0xFFFFFFFF

Sums = tuple[int, int]


def unreadable_commits(log: Path, page_bytes: int) -> int:
    """Count the transactions that lie behind the first frame that SQLite cannot read.

    Args:
        log: the file `...-wal`; one that is missing or empty has none.
        page_bytes: of the database.

    Returns:
        1 may be what a loss of power cut off; more mean that the file is damaged.

    Raises:
        OSError: it cannot be read.
    """
    data = log.read_bytes() if log.exists() else b""
    size = _FRAME + page_bytes
    frames = [data[at : at + size] for at in range(_HEADER, len(data) - size + 1, size)]
    sums, order, salts = _header(data, page_bytes)
    behind = 0
    for frame in frames:
        is_of_this_log = not salts or frame[8:16] == salts  # else left over from an older one
        if sums is not None and is_of_this_log:
            sums = _checked(frame[:8] + frame[_FRAME:], order, sums)
            if struct.pack(">II", *sums) == frame[16:24]:
                continue
        sums = None
        is_commit = any(frame[4:8])
        behind += is_commit and is_of_this_log
    return behind


def _header(data: bytes, page_bytes: int) -> tuple[Sums | None, str, bytes]:
    """The checksum so far, the byte order of words, the salts; no sums and salts if it is bad."""
    if len(data) < _HEADER:
        return None, "", b""
    magic, _, page, _ = struct.unpack(">IIII", data[:16])
    order = {_LITTLE_ENDIAN: "<", _BIG_ENDIAN: ">"}.get(magic)
    if order is None or page != page_bytes:
        return None, "", b""
    sums = _checked(data[:24], order, (0, 0))
    if struct.pack(">II", *sums) != data[24:32]:
        return None, "", b""
    return sums, order, data[16:24]


def _checked(data: bytes, order: str, sums: Sums) -> Sums:
    """The checksum continued over some data."""
    first, second = sums
    for even, odd in struct.iter_unpack(f"{order}II", data):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second
