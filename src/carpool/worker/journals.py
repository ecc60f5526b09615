"""Journals of the requests that are being answered, in the front's memory, of bounded size.

An answer that is dropped is no harm: the request makes that step again, should its worker die.
"""

from collections.abc import Iterable
from typing import Protocol

from carpool.types import JournalEntry

MOST_BYTES = 512 << 20
_OVERHEAD_BYTES = 200  # of an entry


class File(Protocol):
    """Where the entries of one request go, besides the memory. Nothing in it blocks."""

    def append(self, entry: JournalEntry) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class Journals:
    """What requests were answered so far, by their ids.

    Several supervisors may share one: what a worker wrote down, the next one reads.

    Args:
        most_bytes: of all together; the oldest request's are dropped first.
        of_all: requests have one; else only those for which one was opened, as for jobs.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, *, of_all: bool = True) -> None:
        self.of_all = of_all
        self._most_bytes, self.bytes = most_bytes, 0
        self.steps_again = 0  # steps that were told before: a worker died after them
        self._entries: dict[str, list[JournalEntry]] = {}
        self._files: dict[str, File] = {}
        self._gaps: set[str] = set()  # requests of which something was dropped
        self._told: dict[str, dict[str, int]] = {}  # the last step, by what was told of it

    def __len__(self) -> int:
        return len(self._entries)

    def starts_late(self, request_id: str) -> bool:
        """Whether a new worker goes on with the request; else it starts over."""
        goes_on = bool(self._entries.get(request_id))
        if not goes_on:
            self._told.pop(request_id, None)
        return goes_on

    def is_whole(self, request_id: str) -> bool:
        """Whether all that was added of a request is there."""
        return request_id in self._entries and request_id not in self._gaps

    def tell(self, kind: str, request_id: str, step: int) -> bool:
        """Whether so much is news of a request; step 0: it starts over."""
        told = self._told.setdefault(request_id, {}) if request_id in self._entries else {}
        if not step:
            told.clear()
            return True
        is_news = step > told.get(kind, 0)
        self.steps_again += kind == "step" and not is_news
        told[kind] = max(step, told.get(kind, 0))
        return is_news

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def entries(self, request_id: str) -> list[JournalEntry]:
        """What is known of a request, in the order of its calls."""
        return list(self._entries.get(request_id, ()))

    def open(
        self, request_id: str, past: Iterable[JournalEntry] = (), file: File | None = None
    ) -> None:
        """Keep what is added of this request from now on. Harmless when done twice.

        Args:
            past: what is known of it already.
            file: takes what comes, too.
        """
        if request_id not in self._entries:
            self._entries[request_id] = []
            for entry in past:
                self.add(request_id, entry)
        if file is not None:
            self._end(request_id)
            self._files[request_id] = file

    def _end(self, request_id: str) -> None:
        if file := self._files.pop(request_id, None):
            file.close()

    def add(self, request_id: str, entry: JournalEntry) -> None:
        """Add an answer. One that is not later than all before: the request has started over."""
        entries = self._entries.get(request_id)
        if entries is None:
            return  # it was answered, or given up
        while entries and entries[-1].number >= entry.number:
            self.bytes -= _bytes(entries.pop())
        entries.append(entry)
        self.bytes += _bytes(entry)
        if file := self._files.get(request_id):
            file.append(entry)
        if self.bytes > self._most_bytes:
            self._make_room()

    def clear(self, request_id: str) -> None:
        """Drop what is known of a request, which goes on."""
        if entries := self._entries.get(request_id):
            self.bytes -= sum(map(_bytes, entries))
            entries.clear()
        if file := self._files.get(request_id):
            file.clear()

    def close(self, request_id: str) -> None:
        """The request is answered, or given up."""
        self.bytes -= sum(map(_bytes, self._entries.pop(request_id, ())))
        self._told.pop(request_id, None)
        self._gaps.discard(request_id)
        self._end(request_id)

    def _make_room(self) -> None:
        for request_id, entries in self._entries.items():
            if self.bytes <= self._most_bytes:
                return
            if entries:
                self.bytes -= sum(map(_bytes, entries))
                entries.clear()
                self._gaps.add(request_id)


def _bytes(entry: JournalEntry) -> int:
    return len(entry.answer) + _OVERHEAD_BYTES
