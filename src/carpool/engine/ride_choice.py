"""The choice of a request's ride: shared with others, or private.

A ride is shared where that is proven clean, and private where code may keep state that no view of
the pipeline keeps apart. What cannot be seen beforehand shows while a request runs: it changes a
module that others use. The change is taken back at once, and the request runs again, privately.
"""

import logging
from collections import Counter
from collections.abc import Iterable

from carpool.engine.model.load import LoadedPipeline
from carpool.settings.engine import IsolationMode
from carpool.types import CheckedRequest

log = logging.getLogger("carpool")

MAX_CHANGES = 2  # requests that changed modules, after which all of their task ride privately


class RideChoice:
    """Chooses the rides of one engine's requests. For the engine's thread."""

    def __init__(self, loaded: LoadedPipeline, mode: IsolationMode) -> None:
        self._loaded, self._mode = loaded, mode
        self._changes = Counter[str]()  # requests that have changed modules, by task
        self._logged = set[str]()

    @property
    def is_automatic(self) -> bool:
        """Whether a request that changes modules runs again, privately."""
        return self._mode == "auto"

    def private_reasons(self, request: CheckedRequest) -> list[str]:
        """Why a request rides privately; empty: it shares."""
        if self._mode == "private":
            return ["isolation is private"]
        if self._mode == "auto" and self._changes[request.task] >= MAX_CHANGES:
            return [f"{self._name(request)} changes modules while it runs"]
        return []

    def changed(self, request: CheckedRequest, modules: Iterable[str]) -> str:
        """Note that a shared request has changed modules; returns what its client is told."""
        self._changes[request.task] += 1
        reason = f"{self._name(request)} changed {', '.join(modules)}"
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("%s while it ran: such requests run alone", reason)
        return f"the request ran alone: {reason}"

    def _name(self, request: CheckedRequest) -> str:
        return type(self._loaded.originals[request.task]).__name__
