"""Second runs: a request that fails among others runs again alone, before its failure counts.

Code of users may fail only because it shares a thread: an event loop of its own runs already, a
lock is not free in time, another request has changed what it reads. Alone it gives what plain
diffusers gives, or fails as that does; what fails so once is not tried alone again.
"""

from types import TracebackType

import torch

from carpool.engine.foreign_code import runs_foreign_code
from carpool.engine.pipeline_errors import causes
from carpool.engine.request import RequestState
from carpool.errors import CarpoolError

MAX_FAILURES = 1000  # that are known to happen alone; with half of it, more of them are run twice

_Failure = tuple[type[BaseException], str, int]


class SecondRuns:
    """Decides which failed requests of one engine run again. For its thread."""

    def __init__(self) -> None:
        self._lonely = set[_Failure]()

    def is_due(
        self, state: RequestState, error: BaseException, failed_forward: BaseException | None
    ) -> bool:
        """Whether a request that failed is to run again, alone.

        Args:
            failed_forward: raised in its call just before: that ran alone already.
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
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(error), "", 0
    return type(error), trace.tb_frame.f_code.co_filename, trace.tb_lineno
