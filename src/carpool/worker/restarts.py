"""The restart policy: delays between the starts of a worker, and when to give up."""

from carpool.errors import LoadFailed

BACKOFF_S = (0.1, 0.5, 2.0, 8.0, 30.0)  # between restarts of workers that were never ready
FIRST_TRIES = 4  # starts of a model that was never ready, if its workers die while loading


class Restarts:
    """The starts of one worker and its successors."""

    def __init__(self) -> None:
        self._tries = self._deaths = 0  # consecutive, never ready

    def delay_s(self, cause: str, *, was_ready: bool, is_lost: bool, is_first: bool) -> float:
        """The delay before the next start.

        Args:
            cause: how this worker ended.
            is_lost: it may be alive but unreachable: retry forever.
            is_first: no worker was ever ready.

        Raises:
            LoadFailed: too many workers died while loading, and none was ever ready.
        """
        self._tries = 0 if was_ready else self._tries + 1
        self._deaths = 0 if was_ready else self._deaths + (not is_lost)
        if is_first and self._deaths >= FIRST_TRIES:
            count, self._tries, self._deaths = self._deaths, 0, 0
            error = LoadFailed(f"{count} workers died while they loaded the model ({cause})")
            error.wants_memory = True  # out of memory is the usual reason for a kill
            raise error
        return BACKOFF_S[min(max(self._tries - 1, 0), len(BACKOFF_S) - 1)]
