"""The choice of a request's ride: shared with others, or private.

A ride is shared where isolation is proven, and private where code may keep state outside the
pipeline's view. `reach` analyses the code that users' objects can reach before it runs. Other
cases show at run time: the request changes a module that others use, or a process-wide switch.
Then the change is undone at once, and the request runs again, privately.
"""

import logging
import traceback
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from carpool.engine.foreign_code import runs_foreign_code
from carpool.engine.model.loaded import LoadedPipeline
from carpool.engine.pipeline_errors import causes
from carpool.engine.reach import private_reasons
from carpool.engine.request import RequestState
from carpool.errors import CarpoolError, PipelineFailed, named
from carpool.settings.engine import IsolationMode
from carpool.types import CheckedRequest

log = logging.getLogger("carpool")

_Failure = tuple[type[BaseException], str, int]  # class, file and line

MAX_FAILURES = 1000  # kept; with half of it, more failures are run twice
MAX_CHANGES = 2  # changes by requests of one form; then the whole form rides privately


class RideChoice:
    """Chooses a shared or a private ride for each request of an engine. For the engine's thread."""

    def __init__(self, loaded: LoadedPipeline, mode: IsolationMode) -> None:
        self._loaded, self._mode = loaded, mode
        self.deadlock = ""  # the line where an earlier engine deadlocked
        self._changes = Counter[tuple[str, frozenset[str]]]()  # requests with changes, by form
        self._logged = set[str]()
        self._private_reasons: dict[str, list[str]] = {}  # why requests rode privately, by task

    def walk(self) -> None:
        """Analyse the pipelines in advance, so that no request waits for it."""
        if self._mode == "auto":
            for task, pipe in self._loaded.originals.items():
                if reasons := private_reasons(pipe):
                    self._private_reasons[task] = reasons
                for reason in reasons:
                    self._log_once(f"requests run alone: {reason}")

    def private_reasons(self, request: CheckedRequest) -> list[str]:
        """The reasons for a private ride; empty: it shares.

        Raises:
            PipelineFailed: it cannot ride privately: other processes compute with this one.
        """
        if reasons := self._reasons(request):
            self._private_reasons[request.task] = reasons
        return reasons

    @property
    def private_tasks(self) -> dict[str, str]:
        """Why requests ride privately, by task, in one sentence. From any thread."""
        return {task: reasons[0] for task, reasons in self._private_reasons.copy().items()}

    def statistics(self) -> dict[str, Any]:
        """The mode, and why requests rode privately, by task. From any thread."""
        return {"mode": self._mode, "private": dict(self._private_reasons)}

    def warnings(self, reasons: list[str]) -> list[str]:
        """The warning for the client of a private ride; none if all rides are private."""
        if not reasons or self._mode == "private":
            return []
        suffix = f"; further causes: {len(reasons) - 1}" if len(reasons) > 1 else ""
        return [f"the request ran alone: {reasons[0]}{suffix}"]

    def _reasons(self, request: CheckedRequest) -> list[str]:
        if self._mode == "private":
            return ["isolation is private"]
        if self.deadlock:
            return [f"a request was deadlocked with another one at {self.deadlock}"]
        if self._changes[_form(request)] >= MAX_CHANGES:
            return [f"{self._name(request)} changes shared state, or fails in company"]
        if self._mode == "shared":
            return []
        reasons = private_reasons(self._loaded.originals[request.task], request.arguments)
        if reasons:
            self._refuse_in_group(reasons[0])
        for reason in reasons:
            self._log_once(f"requests run alone: {reason}")
        return list(reasons)

    def changed(self, request: CheckedRequest, names: Iterable[str]) -> str:
        """Record that a shared request has changed modules or switches.

        Returns:
            The warning for its client.

        Raises:
            PipelineFailed: it cannot ride privately: other processes compute with this one.
        """
        self._changes[_form(request)] += 1
        first, *rest = names
        suffix = f" and {len(rest)} more" if rest else ""
        reason = f"{self._name(request)} changed {first}{suffix}"
        self._refuse_in_group(reason)
        self._private_reasons[request.task] = [reason]
        self._log_once(f"{reason} while it ran: such requests run alone")
        return f"the request ran alone: {reason}"

    def failed(self, request: CheckedRequest, error: BaseException) -> str:
        """Record that a shared request has failed in company.

        Returns:
            The warning for its client, if it does not fail alone.
        """
        reason = f"{self._name(request)} failed in company"
        self._log_once(f"{reason} ({type(error).__name__}): it runs again, alone")
        return f"the request ran alone: {reason}: {named(error)}"

    def succeeded(self, request: CheckedRequest) -> None:
        """Record that a request that failed in company has succeeded alone."""
        self._changes[_form(request)] += 1

    def _refuse_in_group(self, reason: str) -> None:
        if self._loaded.group is not None:
            raise PipelineFailed(
                f"{reason}, which the other ranks of context_parallel cannot follow: serve "
                "this with context_parallel=1"
            )

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s", text)

    def _name(self, request: CheckedRequest) -> str:
        return type(self._loaded.originals[request.task]).__name__


def _form(request: CheckedRequest) -> tuple[str, frozenset[str]]:
    """The task and the names of the arguments: requests of one form carry the same risk."""
    return request.task, frozenset(request.arguments)


class SecondRuns:
    """Decides whether a request that failed in company runs again alone. For the engine's thread.

    User code may fail only because it shares a thread: an event loop already runs, a lock times
    out, another request has changed data that it reads. A failure that once happened alone is not
    retried.
    """

    def __init__(self) -> None:
        self._lonely = set[_Failure]()

    def is_due(
        self, state: RequestState, error: BaseException, failed_forward: BaseException | None
    ) -> bool:
        """Whether to run a failed request again, alone.

        Args:
            failed_forward: the error of its call just before: that call has already run alone.
        """
        failure = _failure(error)
        if state.context is None or state.context.is_private:
            if len(self._lonely) < MAX_FAILURES:
                self._lonely.add(failure)
            return False
        return (
            state.has_company
            and failure not in self._lonely
            and isinstance(error, Exception)
            and not isinstance(error, (CarpoolError, torch.OutOfMemoryError))
            and all(cause is not failed_forward for cause in causes(error))
            and runs_foreign_code(state.view, state.request.arguments)
        )


def _failure(error: BaseException) -> _Failure:
    """The class of an exception and the line that raised it."""
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__, -1)]
    return type(error), *(frames or [("", 0)])[0]
