"""Check a write-ahead log before SQLite reads it: SQLite silently drops all after a bad frame.

A crash cuts off at most one transaction, which was never acknowledged. Commits after an unreadable
frame mean later damage of the file; those commits were acknowledged.

Source: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

import struct
from pathlib import Path

_HEADER, _FRAME = 32, 24  # bytes: header of the file, header of a frame
_ORDERS = {0x377F0682: "<", 0x377F0683: ">"}  # byte order of checksummed words, by magic number
_MASK = 0xFFFFFFFF

Sums = tuple[int, int]


def unreadable_commits(log: Path, page_bytes: int) -> int:
    """Count the transactions after the first frame that SQLite cannot read.

    Args:
        log: the file `...-wal`; a missing or empty file has none.
        page_bytes: page size of the database.

    Returns:
        1 may be a transaction cut off by a power loss; more mean a damaged file.

    Raises:
        OSError: the log cannot be read.
    """
    data = log.read_bytes() if log.exists() else b""
    sums, order, salts = _header(data, page_bytes)
    size, behind = _FRAME + page_bytes, 0
    for at in range(_HEADER, len(data) - size + 1, size):
        frame = data[at : at + size]
        is_of_this_log = not salts or frame[8:16] == salts  # otherwise a leftover of an older log
        if sums is not None and is_of_this_log:
            sums = _checksum(frame[:8] + frame[_FRAME:], order, sums)
            if struct.pack(">II", *sums) == frame[16:24]:
                continue
        sums = None
        is_commit = any(frame[4:8])
        behind += is_commit and is_of_this_log
    return behind


def _header(data: bytes, page_bytes: int) -> tuple[Sums | None, str, bytes]:
    """The running checksum, byte order and salts; no checksum and salts if invalid."""
    if len(data) >= _HEADER:
        magic, _, page = struct.unpack_from(">III", data)
        if (order := _ORDERS.get(magic)) and page == page_bytes:
            sums = _checksum(data[:24], order, (0, 0))
            if struct.pack(">II", *sums) == data[24:_HEADER]:
                return sums, order, data[16:24]
    return None, "", b""


def _checksum(data: bytes, order: str, sums: Sums) -> Sums:
    """Continue a checksum over more data."""
    first, second = sums
    for even, odd in struct.iter_unpack(f"{order}II", data):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second
