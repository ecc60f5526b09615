"""The lives of requests: what each did when, with how many it rode, and what it waited for.

A `Life` belongs to a rider; `Lives` finds it by id, until so many others have ended after it.
What a parked call waits for is told by differences: `Lives` sums up the seconds of all forwards,
those of each module, and those of each fuse key, and a call notes where these stood as it parked.
So nothing is done for those who wait, however many they are. All but `to_json` is
for the engine's thread.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any
from weakref import WeakValueDictionary

from carpool.errors import Cancelled, CarpoolError
from carpool.types import Phase, Timings

KEPT = 1000  # requests that have ended


@dataclass(slots=True, weakref_slot=True)
class Sum:
    """Seconds of forwards."""

    seconds: float = 0.0


@dataclass(slots=True)
class Mark:
    """Where the sums stood when a call parked."""

    at_s: float
    module: Sum
    key: Sum
    all_s: float
    module_s: float
    key_s: float


@dataclass(slots=True)
class Chapter:
    """What a request did in one phase. Seconds."""

    start_s: float  # engine clock
    duration_s: float = 0.0
    forwards: int = 0
    forward_s: float = 0.0  # on CUDA until they were launched, as `Forward.duration_s`
    others: int = 0  # that rode with it, summed over its forwards
    others_most: int = 0
    place_s: float = 0.0  # parked while forwards ran that it could have ridden in
    incompatible_s: float = 0.0  # ... of its module, with other keys
    modules_s: float = 0.0  # ... of other modules
    engine_s: float = 0.0  # parked while none ran: the pipelines' own code, and the engine's

    def to_json(self, phase: Phase, submitted_s: float) -> dict[str, Any]:
        waited = {
            "place_in_forward": self.place_s,
            "incompatible_forwards": self.incompatible_s,
            "other_modules": self.modules_s,
            "engine": self.engine_s,
        }
        return {
            "phase": phase,
            "start_s": self.start_s - submitted_s,
            "duration_s": self.duration_s,
            "forwards": self.forwards,
            "forward_s": self.forward_s,
            "waited_s": sum(waited.values()),
            "waited_for_s": waited,
            "others_mean": self.others / self.forwards if self.forwards else 0.0,
            "others_most": self.others_most,
        }


@dataclass(slots=True, weakref_slot=True)
class Life:
    """One request, from its submission on. Times are of the engine's clock."""

    request_id: str
    submitted_s: float
    started_s: float = inf
    ended_s: float = inf
    step: int = 0
    steps: int = 0
    error: str | None = None  # code of what it failed with
    is_cancelled: bool = False
    phase: Phase = "encode"
    mark: Mark | None = None  # of the call it is parked on
    exclusive: list[str] = field(default_factory=list)  # components that it changed for itself
    _since_s: float = inf  # in this phase
    _chapters: dict[Phase, Chapter] = field(default_factory=dict)

    def start(self, now_s: float) -> None:
        """Get aboard."""
        self.started_s = self._since_s = now_s
        self._chapters["encode"] = Chapter(now_s)

    def turn_to(self, phase: Phase, now_s: float) -> None:
        """Enter a phase, which may be one that it was in before."""
        self._chapters[self.phase].duration_s += now_s - self._since_s
        self.phase, self._since_s = phase, now_s
        self._chapters.setdefault(phase, Chapter(now_s))

    def wait(self, all_s: float, now_s: float) -> Chapter:
        """Tell apart what was waited for since the mark; `all_s` is the sum of all forwards."""
        chapter, mark, self.mark = self._chapters[self.phase], self.mark, None
        if mark is not None:
            key_s, module_s = mark.key.seconds - mark.key_s, mark.module.seconds - mark.module_s
            chapter.place_s += key_s
            chapter.incompatible_s += module_s - key_s
            chapter.modules_s += all_s - mark.all_s - module_s
            chapter.engine_s += now_s - mark.at_s - (all_s - mark.all_s)
        return chapter

    def timings(self) -> Timings:
        """Where the time went, once it has ended."""
        queue_s, total_s = min(self.started_s, self.ended_s), self.ended_s - self.submitted_s
        spent = {f"{phase}_s": one.duration_s for phase, one in self._chapters.items()}
        return Timings(queue_s=queue_s - self.submitted_s, total_s=total_s, **spent)

    def fail(self, error: Exception | None) -> None:
        """Note the error that the request ended with, if any; only its code is kept."""
        if error is not None:
            self.error = error.code if isinstance(error, CarpoolError) else CarpoolError.code
            self.is_cancelled = isinstance(error, Cancelled)

    @property
    def status(self) -> str:
        """`queued`, `running`, `ok`, `failed` or `cancelled`."""
        if self.ended_s == inf:
            return "queued" if self.started_s == inf else "running"
        return "cancelled" if self.is_cancelled else "failed" if self.error else "ok"

    def to_json(self, now_s: float) -> dict[str, Any]:
        """All of it. Moments are seconds since submission; the call it is parked on is not in."""
        until_s = min(self.ended_s, now_s)
        chapters = []
        for phase, one in self._chapters.copy().items():
            chapters.append(one.to_json(phase, self.submitted_s))
            if self.ended_s == inf and phase == self.phase:
                chapters[-1]["duration_s"] += until_s - self._since_s
        return {
            "id": self.request_id,
            "status": self.status,
            "error": self.error,
            "step": self.step,
            "steps": self.steps,
            "exclusive": self.exclusive,
            "queued_s": min(self.started_s, until_s) - self.submitted_s,
            "total_s": until_s - self.submitted_s,
            "phases": chapters,
        }


class Lives:
    """All requests that wait or run, and the last that ended; with the sums of their forwards."""

    def __init__(self, kept: int = KEPT) -> None:
        self._known: WeakValueDictionary[str, Life] = WeakValueDictionary()
        self._ended: deque[Life] = deque(maxlen=kept)
        self._all_s = 0.0
        self._modules: dict[Hashable, Sum] = {}
        self._keys: WeakValueDictionary[Hashable, Sum] = WeakValueDictionary()  # of parked calls

    def begin(self, request_id: str, now_s: float) -> Life:
        """Begin a life. Whoever holds it decides how long it can be found."""
        life = self._known[request_id] = Life(request_id, now_s)
        return life

    def to_json(self, request_id: str, now_s: float) -> dict[str, Any] | None:
        """The youngest life with this id; None if there is none any more. From any thread."""
        life = self._known.get(request_id)
        return None if life is None else life.to_json(now_s)

    def parked(self, life: Life, module: Hashable, key: Hashable, now_s: float) -> None:
        """The request waits with a call of this key."""
        of_module = self._modules.setdefault(module, Sum())
        of_key = self._keys.get(key)
        if of_key is None:
            of_key = self._keys[key] = Sum()
        life.mark = Mark(now_s, of_module, of_key, self._all_s, of_module.seconds, of_key.seconds)

    def rode(self, together: Sequence[Life], began_s: float, ended_s: float) -> None:
        """Calls of one key have ridden together; one that was split on the way counts as one."""
        mark, seconds = together[0].mark, ended_s - began_s
        for life in together:
            chapter = life.wait(self._all_s, began_s)
            chapter.forwards += 1
            chapter.forward_s += seconds
            chapter.others += len(together) - 1
            chapter.others_most = max(chapter.others_most, len(together) - 1)
        self._all_s += seconds
        if mark is not None:
            mark.module.seconds += seconds
            mark.key.seconds += seconds

    def end(self, life: Life, error: Exception | None, now_s: float) -> None:
        """The request is over, or was given up where it waited."""
        if life.started_s < inf:
            life.wait(self._all_s, now_s)
            life.turn_to(life.phase, now_s)
        life.ended_s = now_s
        life.fail(error)
        self._ended.append(life)
