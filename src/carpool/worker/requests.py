"""The requests of one worker, on the front's side: sent, tracked, answered, sent again.

When a worker dies, its requests are `Moved`, except those that `guilt` suspects: the next worker
runs these in the order of `in_flight`, from the step that their journals reach (`journals.py`), or
from their start. Guilty requests fail. On the event loop.
"""

import asyncio
from collections.abc import Callable

from carpool.errors import CarpoolError, PipelineFailed, by_name
from carpool.telemetry import tracing
from carpool.types import CheckedRequest, OnProgress
from carpool.worker import protocol
from carpool.worker.guilt import CrashEvidence, Death, DeathLog
from carpool.worker.in_flight import InFlight, OnPreview, RequestInFlight
from carpool.worker.journals import Journals


class Moved(Exception):
    """The request has to run on another worker: this one died, or released it.

    Args:
        was_released: the worker is alive and released it on demand.
    """

    def __init__(self, *, was_released: bool = False) -> None:
        super().__init__("it is to run elsewhere")
        self.was_released = was_released


class WorkerRequests:
    """The requests of one worker and its successors.

    Args:
        send: sends a message to the current worker, if there is one.
        journals: for resuming requests; None: they start over.
        changed: called when the worker may accept requests again.
        deaths: deaths of all workers.
    """

    def __init__(
        self,
        send: Callable[[protocol.ToWorker], None],
        journals: Journals | None,
        changed: Callable[[], None],
        *,
        deaths: DeathLog,
    ) -> None:
        self._send, self._changed, self._deaths = send, changed, deaths
        self._journals = Journals(of_all=False) if journals is None else journals
        self._in_flight = InFlight()
        self._is_ready = False  # the worker accepts requests

    @property
    def sent(self) -> list[str]:
        """The ids of the requests that the worker has."""
        return [request.request_id for request in self._in_flight.values() if request.is_sent]

    @property
    def has_suspects(self) -> bool:
        """Whether a request has to run alone."""
        return self._in_flight.has_suspects

    async def run(
        self,
        request: CheckedRequest,
        on_progress: OnProgress | None,
        on_preview: OnPreview | None,
        waited_s: float,
        evidence: CrashEvidence | None = None,
        is_admitted: bool = False,
    ) -> protocol.Done:
        """Run a request; arguments and errors as in `Supervisor.submit`."""
        loop = asyncio.get_running_loop()
        if self._journals.of_all:
            self._journals.open(request.request_id)
        is_journalled = request.request_id in self._journals
        follow = on_progress is not None or not is_journalled  # progress is needed, see `guilt`
        trace = tracing.carried()
        submit = protocol.Submit(request, follow, trace, waited_s, is_admitted, is_journalled)
        pending = self._in_flight[request.request_id] = RequestInFlight(
            submit, loop.create_future(), evidence or CrashEvidence(), on_progress, on_preview,
            came_s=loop.time(),
        )  # fmt: skip
        try:
            self._send_due()
            return await pending.answer
        finally:
            if self._in_flight.remove(pending) and pending.is_sent:  # not answered
                self._send(protocol.Cancel(pending.request_id))
            self._send_due()
            if pending.evidence.deaths:  # a suspect may have kept others from the worker
                self._changed()

    def release(self, request_id: str) -> None:
        """Ask the worker to release a request, so that it is `Moved`; no effect after its end."""
        request = self._in_flight.get(request_id)
        if request is not None and request.is_sent:
            self._send(protocol.Release(request_id))

    def worker_is_ready(self) -> None:
        """Send the requests to a worker that is ready; guilty ones fail.

        Only now is it known whether other workers died together with the last one.
        """
        self._is_ready = True
        for guilty in self._in_flight.take_guilty():
            guilty.resolve(_condemned(guilty.evidence))
        self._send_due()

    def pause(self) -> None:
        """Stop sending requests: the worker has ended, with a cause not yet known."""
        self._is_ready = False

    def worker_died(self, death: Death) -> None:
        """Let a dead worker's requests resume elsewhere, or start over; suspects stay here."""
        self._is_ready = False
        ran = self._in_flight.worker_died(death)
        self._deaths.add(death)
        for request in ran:
            if request.evidence.is_journal_suspect:
                self._journals.clear(request.request_id)  # the journal may have killed the worker
        for request in list(self._in_flight.values()):
            goes_on = self._journals.starts_late(request.request_id)
            if not goes_on and not request.answer.done() and request.on_progress is not None:
                request.on_progress(0, 0)
            evidence = request.evidence
            if not (evidence.is_suspect or evidence.is_guilty):
                self._in_flight.remove(request)
                request.resolve(Moved())

    def receive(self, message: protocol.AboutRequest) -> None:
        """Handle a worker's message about a request."""
        match message:
            case protocol.Started(request_id):
                if request := self._in_flight.get(request_id):
                    request.has_started = True
            case protocol.Answers(entries, passed):
                for request_id, entry in entries:
                    if request_id in self._in_flight:
                        self._journals.add(request_id, entry)
                        self._advanced(request_id, entry.number)
                for request_id, number in passed.items():
                    self._advanced(request_id, number)
            case protocol.RequestReleased(request_id):
                if (request := self._in_flight.get(request_id)) is not None:
                    self._in_flight.remove(request)
                    request.resolve(Moved(was_released=True))
            case protocol.Progress(request_id, step, steps):
                request = self._in_flight.get(request_id)
                if request is not None and not request.submit.is_journalled:
                    self._advanced(request_id, step)
                is_news = self._journals.tell("step", request_id, step)
                if request is not None and request.on_progress is not None and is_news:
                    request.on_progress(step, steps)
            case protocol.Preview() as preview:
                request = self._in_flight.get(preview.request_id)
                about = preview.request_id, preview.step
                is_news = preview.is_prompt or self._journals.tell("preview", *about)
                if request is not None and request.on_preview is not None and is_news:
                    request.on_preview(preview)
            case protocol.Done() as answer:
                self.answer(answer.request_id, answer)
            case protocol.RequestFailed() as failed:
                cls, again_s = by_name(failed.error), failed.retry_after_s
                error = cls(failed.message, param=failed.param, retry_after_s=again_s)
                self.answer(failed.request_id, error)

    def answer(self, request_id: str, answer: protocol.Done | CarpoolError) -> None:
        """Resolve a request that has ended."""
        if (request := self._in_flight.get(request_id)) is not None:
            self._in_flight.remove(request)
            request.resolve(answer)

    def fail_all(self, error: CarpoolError) -> None:
        for request in list(self._in_flight.values()):
            self.answer(request.request_id, error)

    def _send_due(self) -> None:
        """Send the requests that are due to a ready worker."""
        if self._is_ready:
            for request in self._in_flight.take_due():
                past = self._journals.entries(request.request_id)
                request.evidence.begins(past[-1].number if past else 0)
                waited_s = asyncio.get_running_loop().time() - request.came_s
                self._send(request.submit.after(past, waited_s))
                request.submit.is_admitted = True  # this worker accepts it

    def _advanced(self, request_id: str, position: int) -> None:
        """Record the progress of a request; it may clear a suspect."""
        if (request := self._in_flight.get(request_id)) is None:
            return
        was_suspect = request.evidence.is_suspect
        request.evidence.reached(position)
        if was_suspect and not request.evidence.is_suspect:
            self._send_due()
            self._changed()


def _condemned(evidence: CrashEvidence) -> PipelineFailed:
    """The error for a guilty request."""
    cause = "this request ran in several workers that died at the same point of it, the last alone"
    if evidence.is_stuck:
        cause = f"this request ran in {evidence.lives} workers that died, without any progress"
    return PipelineFailed(f"{cause}; it is not tried again")
