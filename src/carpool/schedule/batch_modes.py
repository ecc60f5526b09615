"""The modes that decide at admission: `off`, `dynamic` and `request`.

In all three, requests admitted together run together to the end, and none joins on the way.
`batches.py` chooses the members of a batch; this module decides when it starts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from carpool.schedule.peers.batches import (
    GroupedRequest,
    fill,
    grouped_requests,
    wait_until,
    wave,
    wave_deadline,
)
from carpool.schedule.views import Admission, Choice, ParkedCall, QueuedRequest
from carpool.settings.peers.sglang_rules import Caps
from carpool.telemetry.sglang_metrics import Dispatches, processed


class _WholeBatches:
    """Common to these modes: all calls that may share a forward do."""

    __slots__ = ()

    def choose(
        self,
        parked: Sequence[ParkedCall],
        waiting_s: float,
        now_s: float,
        all_parked: Sequence[ParkedCall] | None = None,
    ) -> Choice:
        return together(parked)


@dataclass(slots=True)
class Off(_WholeBatches):
    """One request at a time, one call at a time."""

    def admit(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> Admission:
        return Admission(()) if running or not waiting else Admission((waiting[0].request,))


@dataclass(slots=True)
class Dynamic(_WholeBatches):
    """SGLang-Diffusion's dynamic batching: compatible requests join the head of the queue."""

    max_size: int = 1
    delay_s: float = 0.0
    caps: Callable[[QueuedRequest], Caps] | None = None  # of a batching config; None: `max_size`
    dispatches: Dispatches = field(default_factory=Dispatches)  # counts every batch
    say: Callable[[str], None] = lambda line: None  # logs a line
    _running: int = 0  # requests of the running batch

    def admit(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> Admission:
        if running:
            return Admission(())
        if self._running > 1:
            self.say(processed(self._running, self.max_size, self.delay_s))
        self._running = 0
        queue, again_s = grouped_requests(waiting, len(waiting), now_s)
        if not queue:
            return Admission((), wake_s=again_s)
        head, rest = queue[0].view, [entry.view for entry in queue[1:]]
        caps = self.caps(head) if self.caps else Caps(self.max_size, None)
        batch = fill(head, rest, caps, self.max_size)
        if (leaves_s := wait_until(head, batch, self.delay_s)) > now_s:
            return Admission((), wake_s=min(leaves_s, again_s))
        self._running = 1 + len(batch.joined)
        size, waited_s = (batch.outputs, batch.cap, self.max_size), now_s - head.arrived_s
        why = batch.stop_reason, batch.rejects
        for text in self.dispatches.record(*size, waited_s, *why, requests=self._running):
            self.say(text)
        batched = [queue[0], *(queue[1 + place] for place in batch.joined)]
        return Admission(_numbers(batched), stop_reason=batch.stop_reason)


@dataclass(slots=True)
class Waves(_WholeBatches):
    """vLLM-Omni's request-level batching: the longest prefix of the queue with equal keys."""

    max_num_seqs: int = 1
    wait_s: float = 0.0
    _free_since_s: float | None = field(default=None)

    def admit(self, waiting: Sequence[QueuedRequest], running: int, now_s: float) -> Admission:
        if running or not waiting:
            self._free_since_s = None
            return Admission(())
        if self._free_since_s is None:
            self._free_since_s = now_s
        queue, again_s = grouped_requests(waiting, self.max_num_seqs, now_s)
        if not queue:
            return Admission((), wake_s=again_s)
        leaves_s = wave_deadline(
            len(queue),
            self.max_num_seqs,
            began_s=self._free_since_s,
            last_arrival_s=waiting[-1].arrived_s,
            wait_s=self.wait_s if self.max_num_seqs > 1 else 0.0,
        )
        if leaves_s > now_s:
            return Admission((), wake_s=min(leaves_s, again_s))
        self._free_since_s = None
        size = wave([entry.view.wave for entry in queue], self.max_num_seqs)
        return Admission(_numbers(queue[:size]))


def _numbers(groups: Sequence[GroupedRequest]) -> tuple[int, ...]:
    return tuple(number for group in groups for number in group.numbers)


def together(parked: Sequence[ParkedCall]) -> Choice:
    """The oldest call, with all calls that may share its forward, memory permitting."""
    if not parked:
        return Choice(())
    queue = sorted(parked, key=lambda call: call.order)
    leader, rows = queue[0], 0
    batch: list[ParkedCall] = []
    for call in queue:
        if call.key != leader.key:
            continue
        if batch and rows + call.rows > leader.max_rows:
            return Choice(tuple(batch), "cap")
        batch.append(call)
        rows += call.rows
    return Choice(tuple(batch), "nobody")
