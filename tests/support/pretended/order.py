"""What happens before what: streams, events and the host, and memory that they touch.

Each stream counts its operations, and has a vector of what it has waited for of every other
stream; so has the host. An operation on memory is a race, unless its stream has waited for those
before it. Values are there at once, so a race is an error here where on a real device it would be
a wrong picture now and then.

Source: vector clocks, C. Fidge, 1988, and F. Mattern, 1989; as in ThreadSanitizer.
"""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

Clock = dict[int, int]  # by stream: operations of it that are known to be over


class Race(AssertionError):
    """Memory was used before work on it was over; noted in `Order.races`, too."""


class Stream:
    """A queue of work, as `torch.Stream`."""

    def __init__(self, device: Any = None, *, priority: int = 0, **_: Any) -> None:
        if "streams" in LACKS:
            raise RuntimeError("Backend doesn't support create a new Stream.")
        self.device, self.priority = device, priority
        with Order.lock:
            Order.streams += 1
            self.stream_id = Order.streams
        Order.all_streams.add(self)
        self.count, self.knows = 0, Clock()
        self._outer: list[Stream] = []

    def __enter__(self) -> "Stream":
        self._outer.append(ORDER.current)
        ORDER.current = self
        return self

    def __exit__(self, *_: object) -> None:
        ORDER.current = self._outer.pop()

    def wait_event(self, event: "Event") -> None:
        merge(self.knows, event.knows)

    def wait_stream(self, other: "Stream") -> None:
        merge(self.knows, other.now())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def now(self) -> Clock:
        """All that is over once this stream is."""
        return {**self.knows, self.stream_id: self.count}

    def query(self) -> bool:
        return ORDER.host.get(self.stream_id, 0) >= self.count

    def synchronize(self) -> None:
        merge(ORDER.host, self.now())


class Event:
    """A moment in a stream, as `torch.Event`. It is over for those who waited for it."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        if "events" in LACKS:
            raise RuntimeError("Backend doesn't support events.")
        self.device, self._enable_timing = device, enable_timing
        self.knows = Clock()

    def record(self, stream: Stream | None = None) -> None:
        check_life()
        self.knows = (stream or ORDER.current).now()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or ORDER.current).wait_event(self)

    def query(self) -> bool:
        return all(ORDER.host.get(stream, 0) >= n for stream, n in self.knows.items())

    def synchronize(self) -> None:
        check_life()
        merge(ORDER.host, self.knows)

    def elapsed_time(self, end: "Event") -> float:
        for event in (self, end):
            assert event._enable_timing, "an event without timing is timed"
            assert event.query(), "an event is timed before it is over"
        return 1.0  # millisecond


LACKS: set[str] = set()
"""What the device is not to have: "events", "streams"; "life", once it has failed for good."""


def check_life() -> None:
    """A device that has failed answers every call with an error."""
    if "life" in LACKS:
        raise torch.AcceleratorError("pretended error: an illegal memory access was encountered")


class Order(threading.local):
    """The current stream of each thread; all threads are one host."""

    lock = threading.Lock()
    streams = 0  # ever made
    host = Clock()
    races: list[str] = []
    all_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()
    default: Stream
    _current: Stream | None = None

    @property
    def current(self) -> Stream:
        return self._current or self.default

    @current.setter
    def current(self, stream: Stream) -> None:
        self._current = stream

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for stream in list(Order.all_streams):
            stream.synchronize()

    def race(self, what: str) -> None:
        Order.races.append(what)
        raise Race(what)


def merge(into: Clock, other: Clock) -> None:
    for stream, n in other.items():
        if into.get(stream, 0) < n:
            into[stream] = n


class Budget:
    """Bytes of the device that are taken."""

    def __init__(self) -> None:
        self.taken = self.peak = 0
        self.limit = 80 * 2**30

    def take(self, size: int) -> None:
        if self.taken + size > self.limit:
            raise torch.OutOfMemoryError(
                f"pretended out of memory. Tried to allocate {size} bytes beside {self.taken} of "
                f"{self.limit}"
            )
        self.taken += size
        self.peak = max(self.peak, self.taken)

    def reset(self) -> None:
        self.peak = self.taken


MEMORY = Budget()


class Memory:
    """The memory of one storage: which operations touched which of its bytes last."""

    __slots__ = ("home", "is_host", "marks", "size", "used_by")

    def __init__(self, size: int, *, is_host: bool) -> None:
        self.home = ORDER.current  # its allocator gives it to others of this stream once it is free
        self.is_host = is_host
        self.marks: dict[Span, Mark] = {}  # by the bytes of the tensors
        self.used_by: set[int] = set()  # `record_stream`
        self.size = 0  # bytes that are counted
        if not is_host:
            MEMORY.take(size)
            self.size = size

    def __del__(self) -> None:
        """The allocator may give it to the next tensor of its own stream, at once."""
        if self.is_host:
            return  # the allocator of pinned memory waits for copies itself
        MEMORY.taken -= self.size
        for stream, n in [read for mark in self.marks.values() for read in mark.reads.items()]:
            is_known = stream in self.used_by or stream == self.home.stream_id
            if not is_known and max(self.home.knows.get(stream, 0), ORDER.host.get(stream, 0)) < n:
                Order.races.append(
                    f"memory of stream {self.home.stream_id} was freed while stream {stream} may "
                    "still use it: record_stream, or wait"
                )

    def check(self, span: "Span", knows: Clock, *, is_write: bool, what: str) -> None:
        """Raise unless `knows` has waited for what was done before to these bytes."""
        for (begin, end), mark in self.marks.items():
            if end <= span[0] or span[1] <= begin:
                continue
            if mark.written is not None and knows.get(mark.written[0], 0) < mark.written[1]:
                ORDER.race(f"{what}: read or written before the write of stream {mark.written[0]}")
            for stream, n in mark.reads.items() if is_write else ():
                if knows.get(stream, 0) < n:
                    ORDER.race(f"{what}: written while stream {stream} may still read it")

    def note_write(self, span: "Span", stream: int, count: int) -> None:
        for begin, end in list(self.marks):
            if span[0] <= begin and end <= span[1]:
                del self.marks[begin, end]
        self.marks[span] = Mark((stream, count), {stream: count})


Span = tuple[int, int]
"""The first byte, and the one after the last."""


@dataclass(slots=True)
class Mark:
    """Who touched some bytes: the operation that wrote them, by its stream, and those that read."""

    written: tuple[int, int] | None = None
    reads: Clock = field(default_factory=dict)


Extent = tuple[Memory, Span]


def launch(reads: Iterable[Extent], writes: Iterable[Extent], what: str) -> None:
    """An operation is put into the current stream."""
    stream = ORDER.current
    merge(stream.knows, ORDER.host)
    stream.knows[stream.stream_id] = stream.count
    for memory, span in reads:
        memory.check(span, stream.knows, is_write=False, what=what)
    for memory, span in writes:
        memory.check(span, stream.knows, is_write=True, what=what)
    stream.count += 1
    for memory, span in reads:
        memory.marks.setdefault(span, Mark()).reads[stream.stream_id] = stream.count
    for memory, span in writes:
        memory.note_write(span, stream.stream_id, stream.count)


def host_uses(extents: Iterable[Extent], *, is_write: bool, what: str) -> None:
    """The host reads or writes memory itself."""
    for memory, span in extents:
        memory.check(span, ORDER.host, is_write=is_write, what=what)


ORDER = Order()
Order.default = Stream()
