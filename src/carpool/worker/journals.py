"""Journals of the requests in flight, in the front's memory, of bounded size.

Dropping an answer does no harm: if its worker dies, the request repeats that step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from carpool.types import JournalEntry

MOST_BYTES = 512 << 20
_OVERHEAD_BYTES = 200  # per entry, in addition to its content


class File(Protocol):
    """A second store of one request's entries, in addition to memory. It never blocks."""

    def append(self, entry: JournalEntry) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Journal:
    """The journal of one request."""

    entries: list[JournalEntry] = field(default_factory=list)
    file: File | None = None
    is_whole: bool = True  # no entry was dropped to save memory
    last_steps: dict[str, int] = field(default_factory=dict)  # reported so far, by kind

    @property
    def bytes(self) -> int:
        return sum(map(_bytes, self.entries))


class Journals:
    """The recorded answers of requests' calls, by request id.

    Several supervisors may share it: a worker's records serve its successor.

    Args:
        most_bytes: total limit; the oldest request's entries are dropped first.
        of_all: every request has a journal; else only opened ones, as for jobs.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, *, of_all: bool = True) -> None:
        self.of_all = of_all
        self._most_bytes, self.bytes = most_bytes, 0
        self.steps_again = 0  # repeated steps after deaths of workers
        self._journals: dict[str, _Journal] = {}

    def __len__(self) -> int:
        return len(self._journals)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._journals

    def starts_late(self, request_id: str) -> bool:
        """Whether a new worker resumes the request; else it starts over."""
        journal = self._journals.get(request_id)
        if journal is not None and not journal.entries:
            journal.last_steps.clear()
        return journal is not None and bool(journal.entries)

    def is_whole(self, request_id: str) -> bool:
        """Whether a request's journal is complete."""
        journal = self._journals.get(request_id)
        return journal is not None and journal.is_whole

    def tell(self, kind: str, request_id: str, step: int) -> bool:
        """Record reported progress; returns whether it is new, not a repetition after an earlier
        worker; step 0: it starts over."""
        journal = self._journals.get(request_id)
        steps = {} if journal is None else journal.last_steps
        if not step:
            steps.clear()
            return True
        is_news = step > steps.get(kind, 0)
        self.steps_again += kind == "step" and not is_news
        steps[kind] = max(step, steps.get(kind, 0))
        return is_news

    def entries(self, request_id: str) -> list[JournalEntry]:
        """The entries of a request, in the order of its calls."""
        journal = self._journals.get(request_id)
        return [] if journal is None else list(journal.entries)

    def open(
        self, request_id: str, past: Iterable[JournalEntry] = (), file: File | None = None
    ) -> None:
        """Start to record a request. Harmless when done twice.

        Args:
            past: entries recorded before.
            file: also receives new entries.
        """
        if request_id not in self._journals:
            self._journals[request_id] = _Journal()
            for entry in past:
                self.add(request_id, entry)
        if file is not None:
            journal = self._journals[request_id]
            if journal.file is not None:
                journal.file.close()
            journal.file = file

    def add(self, request_id: str, entry: JournalEntry) -> None:
        """Add an answer. If it is not later than all before, the request has started over."""
        journal = self._journals.get(request_id)
        if journal is None:
            return  # it was answered or given up
        while journal.entries and journal.entries[-1].number >= entry.number:
            self.bytes -= _bytes(journal.entries.pop())
        journal.entries.append(entry)
        self.bytes += _bytes(entry)
        if journal.file is not None:
            journal.file.append(entry)
        if self.bytes > self._most_bytes:
            self._make_room()

    def clear(self, request_id: str) -> None:
        """Drop the entries of a request that continues."""
        if (journal := self._journals.get(request_id)) is not None:
            self.bytes -= journal.bytes
            journal.entries.clear()
            if journal.file is not None:
                journal.file.clear()

    def close(self, request_id: str) -> None:
        """Drop the journal of a request that was answered or given up."""
        if (journal := self._journals.pop(request_id, None)) is not None:
            self.bytes -= journal.bytes
            if journal.file is not None:
                journal.file.close()

    def _make_room(self) -> None:
        for journal in self._journals.values():
            if self.bytes <= self._most_bytes:
                return
            if journal.entries:
                self.bytes -= journal.bytes
                journal.entries.clear()
                journal.is_whole = False


def _bytes(entry: JournalEntry) -> int:
    return len(entry.answer) + _OVERHEAD_BYTES
