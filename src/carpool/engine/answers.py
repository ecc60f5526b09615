"""What answers a request's calls without a forward: one list of sources, in a fixed order.

A call goes to each source of its request before it parks; the first answer is the call's, and all
other sources learn it, as all learn the answer of a forward. The order: the step cache, which
decides by a request's own inputs alone; the journal, whose calls must be asked in the order of its
first run; what only saves time. No source is needed for the output: a request goes on without one
that fails.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from carpool.engine.conditioning_cache import source_of
from carpool.engine.intercept import Call
from carpool.engine.journal import Identity, Journal, Mismatch
from carpool.engine.parts import EngineParts
from carpool.engine.request import AnswerSource, RequestState
from carpool.engine.step_cache import StepCache

_FAILED = object()


@dataclass(frozen=True, slots=True)
class StartOver:
    """In the place of an answer: the request has to run from its start, without a past."""

    reason: str


class AnswerList:
    """Makes the sources of all requests, and asks them. For the engine's thread."""

    def __init__(self, parts: EngineParts) -> None:
        self._identity = Identity(parts.loaded, parts.adapters.digest)
        self._threshold = parts.settings.step_cache  # default of requests; None or 0: no cache
        self._stages, self._stats = parts.stages, parts.stats
        self._makers: tuple[Callable[[RequestState], AnswerSource | None], ...] = (
            self._step_cache, self._journal, parts.conditioning.source,
        )  # fmt: skip
        self.shared = parts.conditioning  # outlives requests

    def begin(self, state: RequestState, *, is_private: bool) -> None:
        """Make the sources of a request that starts, or starts again."""
        state.sources, state.answered_phases = [], set()
        if is_private:  # its calls run inside of its fiber
            state.journal = None
            if state.request.step_cache:
                state.warnings.append("step_cache had no effect: the request runs alone")
            return
        sources = [make(state) for make in self._makers]
        state.sources = [source for source in sources if source is not None]
        state.answered_phases = {phase for source in state.sources for phase in source.phases}

    def answer(self, state: RequestState, call: Call) -> Any | StartOver | None:
        """The answer to a call; None: there is none."""
        for source in [s for s in state.sources if call.target.phase in s.phases]:
            answer = self._ask(state, source, _answer, source, call)
            if answer is not None:
                if not isinstance(answer, StartOver):
                    self.ran(state, call, answer, source)
                return answer
        return None

    def ran(
        self, state: RequestState, call: Call, answer: Any, source: AnswerSource | None = None
    ) -> None:
        """A call got this answer from a forward, or from one of the sources."""
        for listener in [s for s in state.sources if call.target.phase in s.phases]:
            if listener is not source:
                self._ask(state, listener, listener.ran, call, answer)

    def repeated(self, parked: Iterable[RequestState]) -> list[tuple[RequestState, Any]]:
        """Requests whose calls have been answered by equal ones while they waited."""
        self.shared.has_news, answered = False, []
        for state in parked:
            source = source_of(state)
            if source is not None and state.call.target.phase in source.phases:
                answer = self._ask(state, source, source.repeated)
                answered += [(state, answer)] if answer is not None else []
        return answered

    def forget(self) -> None:
        """Drop what outlives requests: modules may have changed."""
        self.shared.clear()

    def _step_cache(self, state: RequestState) -> StepCache | None:
        threshold = state.request.step_cache
        threshold = self._threshold if threshold is None else threshold
        return StepCache(threshold, state.timeline, self._stats.skip) if threshold else None

    def _journal(self, state: RequestState) -> Journal | None:
        if (journal := state.journal) is None:
            return None
        begin = journal.begin
        about = self._identity, state.request, state.timeline
        if self._stages.contain("journal", _FAILED, begin, *about, states=[state]) is _FAILED:
            state.journal = journal = None
        return journal

    def _ask(
        self, state: RequestState, source: AnswerSource, work: Callable[..., Any], *args: Any
    ) -> Any | None:
        answer = self._stages.contain(source.stage, _FAILED, work, *args, states=[state])
        if answer is not _FAILED:
            return answer
        state.sources.remove(source)
        if source is state.journal:
            state.journal = None
        if source.warning:
            state.warnings.append(source.warning)
        return None


def _answer(source: AnswerSource, call: Call) -> Any | StartOver | None:
    try:
        return source.answer(call)
    except Mismatch as mismatch:
        return StartOver(f"its journal does not match: {mismatch}")
