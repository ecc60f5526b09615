"""The events and the outcome of one request, as messages to the front."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from carpool.errors import CarpoolError, PipelineFailed, Released, in_full, named, reason, text_of
from carpool.types import CheckedRequest, Event
from carpool.worker import protocol

if TYPE_CHECKING:  # imports torch
    from carpool.engine.request import Outcome

log = logging.getLogger("carpool")

LastMessage = protocol.Done | protocol.RequestFailed | protocol.RequestReleased


class RequestListener:
    """Sends the events and the outcome of one request.

    Args:
        usage: resolves to the request's token counts.
        convert: converts the pipeline's output to plain bytes; see `raw_output`.
        send: queues a message to the front.
        end: queues the last one.
        step: receives the steps done; None: they are not sent.
    """

    def __init__(
        self,
        request: CheckedRequest,
        usage: Future[tuple[int, int]],
        convert: Callable[[Mapping[str, Any]], dict[str, Any]],
        *,
        send: Callable[[protocol.ToFront], None],
        end: Callable[[LastMessage], None],
        step: Callable[[str, int, int], None] | None,
    ) -> None:
        self._request, self._usage, self._convert = request, usage, convert
        self._send, self._end, self._step = send, end, step
        self.at_start: Callable[[], None] = lambda: None
        self.at_end: Callable[[], None] = lambda: None

    def event(self, event: Event) -> None:
        if event.kind == "started":
            self.at_start()
            self._send(protocol.Started(event.request_id))
        elif self._step is not None and event.kind == "step":
            self._step(event.request_id, event.step, event.steps)
        elif event.kind in ("preview", "prompt"):
            picture = None
            if event.picture is not None:
                height, width, _ = event.picture.shape
                picture = protocol.Picture(width, height, event.picture.tobytes())
            about = event.request_id, event.step, event.steps, picture, event.text
            self._send(protocol.Preview(*about, is_prompt=event.kind == "prompt"))

    def done(self, outcome: "Outcome") -> None:
        self.at_end()
        if isinstance(outcome.error, Released):
            self._end(protocol.RequestReleased(self._request.request_id))
        elif outcome.error is not None:
            self._end(failed(self._request.request_id, outcome.error))
        else:
            # tokens of a long prompt may still be counted: do not delay other outputs
            self._usage.add_done_callback(lambda usage: self._end(self._output(outcome, usage)))

    def _output(
        self, outcome: "Outcome", usage: Future[tuple[int, int]]
    ) -> protocol.Done | protocol.RequestFailed:
        request_id, seed = self._request.request_id, self._request.seed
        try:
            output = self._convert(outcome.fields)
            tokens = protocol.TokenUsage(*usage.result())
        except BaseException as error:  # foreign output classes may raise anything
            return failed(request_id, error)
        return protocol.Done(
            request_id, seed, timings=outcome.timings, usage=tokens, **{"pictures": [], **output},
            warnings=list(outcome.warnings), skipped_steps=outcome.skipped_steps,
            settings=dict(outcome.settings),
        )  # fmt: skip


def failed(request_id: str, error: BaseException) -> protocol.RequestFailed:
    """The message about a failed request; logs details that it omits."""
    failure = error
    if not isinstance(failure, CarpoolError):
        failure = PipelineFailed(named(error))
        failure.__cause__ = error
    cause = failure.__cause__  # not sent to the front
    if cause is not None and (failure.status >= 500 or reason(cause) != text_of(cause)):
        log.error("request %s failed: %s", request_id, in_full(failure))
    return protocol.RequestFailed(
        request_id, type(failure).__name__, text_of(failure), failure.param, failure.retry_after_s
    )
