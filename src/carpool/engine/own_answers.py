"""Answers that a request has for its own calls, without a forward: step cache and journal.

Neither is needed for the output: a request goes on without one that fails.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from carpool.engine.containment import Stages
from carpool.engine.intercept import Call
from carpool.engine.journal import Identity, Journal, Mismatch
from carpool.engine.observe.stats import Stats
from carpool.engine.request import RequestState
from carpool.types import Clock

MAX_REPLAYS = 64  # kept until the next report
_FAILED = object()


@dataclass(frozen=True, slots=True)
class JournalReplay:
    """A request was brought to where it was by its journal."""

    request_id: str
    steps: int  # that were not made again
    took_s: float  # from its start
    ended_s: float  # engine clock


class OwnAnswers:
    """Asks the step caches and journals of all requests. For the engine's thread."""

    def __init__(self, identity: Identity, stages: Stages, stats: Stats, clock: Clock) -> None:
        self._identity, self._stages, self._stats, self._clock = identity, stages, stats, clock
        self._replays: deque[JournalReplay] = deque(maxlen=MAX_REPLAYS)

    def take_replays(self) -> list[tuple[JournalReplay, float]]:
        """Requests that were replayed from journals since the last time, and how long ago. From
        any thread."""
        now_s = self._clock()
        replays = [self._replays.popleft() for _ in range(len(self._replays))]
        return [(replay, now_s - replay.ended_s) for replay in replays]

    def begin(self, state: RequestState) -> None:
        """The request starts."""
        if state.journal is not None:
            self._ask(state, "journal", state.journal.begin, self._identity, state.request)

    def ran(self, state: RequestState, answer: Any) -> None:
        """The call that the request is parked on was answered by a forward."""
        if state.journal is not None:
            self._ask(state, "journal", state.journal.ran, state.call, answer)
        if state.step_cache is not None:
            self._ask(state, "cache", state.step_cache.ran, state.call, answer)

    def answer(self, state: RequestState, call: Call) -> Any | None:
        """The answer to a call; None: there is none; a `Mismatch`: the journal is another's."""
        journal, timeline = state.journal, state.timeline
        if (cache := state.step_cache) is not None:
            answer = self._ask(state, "cache", cache.answer, call, state.step, state.steps)
            if cache.skipped_steps > timeline.skipped_steps:
                timeline.skipped_steps = cache.skipped_steps
                self._stats.skip()
            if answer is not None:
                if journal is not None:
                    self._ask(state, "journal", journal.skip)
                return answer
        if journal is None:
            return None
        answer = self._ask(state, "journal", _recorded, journal, call)
        if answer is not None and not isinstance(answer, Mismatch):
            timeline.replayed_calls += 1
            if cache is not None:
                self._ask(state, "cache", cache.ran, call, answer)
        return answer

    def note_replay(self, state: RequestState) -> None:
        """The journal of the request has brought it to where it was."""
        now_s = self._clock()
        took_s = now_s - state.timeline.started_s
        self._replays.append(JournalReplay(state.request_id, state.step, took_s, now_s))

    def _ask(
        self,
        state: RequestState,
        aid: Literal["journal", "cache"],
        work: Callable[..., Any],
        *args: Any,
    ) -> Any | None:
        answer = self._stages.contain(aid, _FAILED, work, *args, states=[state])
        if answer is not _FAILED:
            return answer
        if aid == "journal":
            state.journal = None
        else:
            state.step_cache = None
            state.warnings.append("step_cache failed and was switched off: all other steps ran")
        return None


def _recorded(journal: Journal, call: Call) -> Any:
    """The answer that a journal has for a call, or how the journal does not match it."""
    try:
        return journal.answer(call)
    except Mismatch as mismatch:
        return mismatch
