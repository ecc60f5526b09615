"""The sources that answer calls without a forward: one list for each request, in a fixed order.

A call goes to each source of its request before it parks; the first answer is used, and all other
sources observe it, as they observe the answers of forwards. The order: the step cache, which
decides by the request's own inputs; the journal, which needs the calls in the order of its first
run; then sources that only save time. No source is required for the output: a request continues
without a source that fails.
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
    """Returned instead of an answer: the request has to run again from its start."""

    reason: str


class AnswerList:
    """Creates and queries the sources of all requests. For the engine's thread."""

    def __init__(self, parts: EngineParts) -> None:
        self._identity = Identity(parts.loaded, parts.adapters.digest)
        self._threshold = parts.settings.step_cache  # default of requests; None or 0: off
        self._stages, self._stats = parts.stages, parts.stats
        self._makers: tuple[Callable[[RequestState], AnswerSource | None], ...] = (
            self._step_cache, self._journal, parts.conditioning.source,
        )  # fmt: skip
        self.shared = parts.conditioning  # lives longer than a request

    def begin(self, state: RequestState, *, is_private: bool) -> None:
        """Create the sources of a request that starts, or starts again."""
        state.sources, state.answered_phases = [], set()
        if is_private:  # its calls run inside its fiber
            state.journal = None
            if state.request.step_cache:
                state.warnings.append("step_cache had no effect: the request runs alone")
            return
        sources = [make(state) for make in self._makers]
        state.sources = [source for source in sources if source is not None]
        state.answered_phases = {phase for source in state.sources for phase in source.phases}

    def answer(self, state: RequestState, call: Call) -> Any | StartOver | None:
        """The answer to a call, or None."""
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
        """Pass a call's answer, from a forward or a source, to the other sources."""
        for listener in [s for s in state.sources if call.target.phase in s.phases]:
            if listener is not source:
                self._ask(state, listener, listener.ran, call, answer)

    def repeated(self, parked: Iterable[RequestState]) -> list[tuple[RequestState, Any]]:
        """Parked requests whose calls can reuse the answers of equal calls that ran since."""
        self.shared.has_news, answered = False, []
        for state in parked:
            source = source_of(state)
            if source is not None and state.call.target.phase in source.phases:
                answer = self._ask(state, source, source.repeated)
                answered += [(state, answer)] if answer is not None else []
        return answered

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
