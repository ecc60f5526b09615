"""Journals of the requests in flight, in the front's memory, of bounded size.

Dropping an answer does no harm: should its worker die, the request makes that step again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from carpool.types import JournalEntry

MOST_BYTES = 512 << 20
_OVERHEAD_BYTES = 200  # of an entry


class File(Protocol):
    """A second store of one request's entries, besides the memory. Nothing in it blocks."""

    def append(self, entry: JournalEntry) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Journal:
    """The journal of one request."""

    entries: list[JournalEntry] = field(default_factory=list)
    file: File | None = None
    is_whole: bool = True  # nothing was dropped for want of room
    told: dict[str, int] = field(default_factory=dict)  # the last step, by what was told of it

    @property
    def bytes(self) -> int:
        return sum(map(_bytes, self.entries))


class Journals:
    """The answers that the calls of requests got so far, by request id.

    Several supervisors may share one: what a worker wrote down, the next one reads.

    Args:
        most_bytes: of all together; the oldest request's are dropped first.
        of_all: requests have one; else only those for which one was opened, as for jobs.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, *, of_all: bool = True) -> None:
        self.of_all = of_all
        self._most_bytes, self.bytes = most_bytes, 0
        self.steps_again = 0  # steps that were told before: a worker died after them
        self._journals: dict[str, _Journal] = {}

    def __len__(self) -> int:
        return len(self._journals)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._journals

    def starts_late(self, request_id: str) -> bool:
        """Whether a new worker goes on with the request; else it starts over."""
        one = self._journals.get(request_id)
        if one is not None and not one.entries:
            one.told.clear()
        return one is not None and bool(one.entries)

    def is_whole(self, request_id: str) -> bool:
        """Whether all that was added of a request is there."""
        one = self._journals.get(request_id)
        return one is not None and one.is_whole

    def tell(self, kind: str, request_id: str, step: int) -> bool:
        """Whether so much is news of a request; step 0: it starts over."""
        one = self._journals.get(request_id)
        told = {} if one is None else one.told
        if not step:
            told.clear()
            return True
        is_news = step > told.get(kind, 0)
        self.steps_again += kind == "step" and not is_news
        told[kind] = max(step, told.get(kind, 0))
        return is_news

    def entries(self, request_id: str) -> list[JournalEntry]:
        """The entries of a request, in the order of its calls."""
        one = self._journals.get(request_id)
        return [] if one is None else list(one.entries)

    def open(
        self, request_id: str, past: Iterable[JournalEntry] = (), file: File | None = None
    ) -> None:
        """Keep what is added of this request from now on. Harmless when done twice.

        Args:
            past: what is known of it already.
            file: takes what comes, too.
        """
        if request_id not in self._journals:
            self._journals[request_id] = _Journal()
            for entry in past:
                self.add(request_id, entry)
        if file is not None:
            one = self._journals[request_id]
            if one.file is not None:
                one.file.close()
            one.file = file

    def add(self, request_id: str, entry: JournalEntry) -> None:
        """Add an answer. One that is not later than all before: the request has started over."""
        one = self._journals.get(request_id)
        if one is None:
            return  # it was answered, or given up
        while one.entries and one.entries[-1].number >= entry.number:
            self.bytes -= _bytes(one.entries.pop())
        one.entries.append(entry)
        self.bytes += _bytes(entry)
        if one.file is not None:
            one.file.append(entry)
        if self.bytes > self._most_bytes:
            self._make_room()

    def clear(self, request_id: str) -> None:
        """Drop what is known of a request, which goes on."""
        if (one := self._journals.get(request_id)) is not None:
            self.bytes -= one.bytes
            one.entries.clear()
            if one.file is not None:
                one.file.clear()

    def close(self, request_id: str) -> None:
        """The request is answered, or given up."""
        if (one := self._journals.pop(request_id, None)) is not None:
            self.bytes -= one.bytes
            if one.file is not None:
                one.file.close()

    def _make_room(self) -> None:
        for one in self._journals.values():
            if self.bytes <= self._most_bytes:
                return
            if one.entries:
                self.bytes -= one.bytes
                one.entries.clear()
                one.is_whole = False


def _bytes(entry: JournalEntry) -> int:
    return len(entry.answer) + _OVERHEAD_BYTES
