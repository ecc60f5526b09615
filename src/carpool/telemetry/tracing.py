"""OpenTelemetry tracing: a span for each request in the front, and its timeline in the worker.

The front's span is a child of the client's, if the client sends `traceparent`. Its context is sent
to the worker with each request. When that has ended, the worker writes a span for it with one child
for each phase: queue, encode, denoise, decode. The denoising span is linked to the spans of the
requests that it shared forwards with. A stored job keeps the context of the HTTP request that
created it, and each of its runs is one more child. No span contains prompts.

OpenTelemetry is imported only if tracing is on, and configured by its own variables
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, ...).

Source: names of attributes, OpenTelemetry's conventions for generative AI (in development).
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from carpool.errors import CarpoolError, LibraryMissing
from carpool.types import CheckedRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Link, Span

OPERATION = "generate_content"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FLUSH_MS = 1000
_COMMON = {"gen_ai.operation.name": OPERATION, "gen_ai.provider.name": "carpool"}


def is_wanted(flag: bool, environ: Mapping[str, str]) -> bool:
    """Return whether tracing is on, by our flag or by OpenTelemetry's own variables."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return flag or any(environ.get(name) for name in ENDPOINTS)


def start(process: str) -> "Tracing":
    """Start to export traces from this process, "front" or "worker".

    Raises:
        LibraryMissing: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise LibraryMissing(
            "traces need OpenTelemetry: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http"
        ) from error

    base = Resource.create({"service.name": "carpool", "carpool.process": process})
    named = OTELResourceDetector().detect()  # the user's names, from the environment
    provider = TracerProvider(resource=base.merge(named))
    exporter = BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=FLUSH_MS)
    provider.add_span_processor(exporter)
    return Tracing(provider)


class Tracing:
    """Writes the spans of one process; with no provider it writes none."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider

    @property
    def is_on(self) -> bool:
        return self._provider is not None

    def stop(self) -> None:
        """Export the remaining spans, for at most a second."""
        if self._provider is not None:
            flush = threading.Thread(target=self._provider.force_flush, daemon=True)
            flush.start()
            flush.join(FLUSH_MS / 1000)

    # In the front

    @contextmanager
    def request(self, headers: Mapping[str, str], request_id: str) -> Iterator[None]:
        """A span around one HTTP request, child of the span that its headers name."""
        if self._provider is None:
            yield
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        with self._provider.get_tracer("carpool").start_as_current_span(
            OPERATION,
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes={**_COMMON, "gen_ai.response.id": request_id},
            record_exception=False,  # messages may repeat what was sent
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except Exception as error:
                failure = error if isinstance(error, CarpoolError) else CarpoolError(repr(error))
                span.set_attribute("error.type", failure.code)
                if failure.status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
                raise

    # In the worker

    def ended(
        self,
        trace: str,
        request: CheckedRequest,
        timeline: Mapping[str, Any],
        shared: Mapping[str, Any] = MappingProxyType({}),
        *,
        ended_s: float | None = None,
    ) -> None:
        """Write the spans of a request that has ended.

        Args:
            trace: the request's context, from `carried`; empty starts a new trace.
            timeline: the result of `engine.observe.timeline.Timeline.to_json`.
            shared: the result of `engine.observe.co_riders.CoRiders`: `others`, the traces of the
                first 32 other requests, and `forwards`, the first and the last 32.
            ended_s: Unix seconds; default: now.
        """
        if self._provider is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        tracer = self._provider.get_tracer("carpool")
        began_s = (time.time() if ended_s is None else ended_s) - timeline["total_s"]
        attributes: dict[str, Any] = {
            **_COMMON,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.seed": request.seed,
            "carpool.task": request.task,
            "carpool.steps": timeline["step"],
            "carpool.queue_s": timeline["queued_s"],
            "carpool.outcome": timeline["status"],
        }
        if timeline["error"]:
            attributes["error.type"] = timeline["error"]
        whole = tracer.start_span(
            f"{OPERATION} {request.task}",
            context=_context(trace),
            kind=SpanKind.INTERNAL,
            start_time=_ns(began_s),
            attributes=attributes,
        )
        inside = set_span_in_context(whole)

        def phase(name: str, start_s: float, duration_s: float, **attributes: Any) -> None:
            forwards = shared if name == "denoise" else {}
            span = tracer.start_span(
                name,
                context=inside,
                start_time=_ns(began_s + start_s),
                attributes=attributes,
                links=[_link(neighbour) for neighbour in forwards.get("others", ())],
            )
            for forward in forwards.get("forwards", ()):
                sizes = {"carpool.rows": forward["rows"], "carpool.requests": forward["requests"]}
                span.add_event("forward", sizes, _ns(began_s + forward["at_s"]))
            span.end(_ns(began_s + start_s + duration_s))

        phase("queue", 0.0, timeline["queued_s"])
        for stage in timeline["phases"]:
            waited = {f"carpool.waited_for_{k}_s": v for k, v in stage["waited_for_s"].items()}
            shares = {
                "carpool.forwards": stage["forwards"],
                "carpool.others_mean": stage["others_mean"],
            }
            phase(stage["phase"], stage["start_s"], stage["duration_s"], **shares, **waited)
        if timeline["status"] == "failed":
            whole.set_status(Status(StatusCode.ERROR))
        whole.end(_ns(began_s + timeline["total_s"]))


def asked(model: str, seeds: Sequence[int], makes: str, *, job_id: str = "") -> None:
    """Record model and seeds of a request in the current span.

    Args:
        seeds: seeds of all outputs.
        makes: "image" or "video".
        job_id: id of the job that makes them in the background.
    """
    if span := _open_span():
        span.update_name(f"{OPERATION} {model}")
        count = {"gen_ai.request.choice.count": len(seeds)} if len(seeds) > 1 else {}
        attributes = {"gen_ai.request.model": model, "gen_ai.response.model": model}
        seed = {"gen_ai.request.seed": seeds[0]}
        job = {"carpool.job": job_id} if job_id else {}
        span.set_attributes({**attributes, **seed, **count, **job, "gen_ai.output.type": makes})


def used(input_tokens: int, output_tokens: int) -> None:
    """Record the token usage in the current span."""
    if span := _open_span():
        span.set_attribute("gen_ai.usage.input_tokens", input_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", output_tokens)


def carried() -> str:
    """The current trace context as a `traceparent`, for the worker; empty if there is none."""
    if not _is_loaded():
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def take_up(trace: str) -> None:
    """Continue a trace from `carried` in the calling task."""
    if _is_loaded():
        from opentelemetry.context import attach

        attach(_context(trace))


def _open_span() -> "Span | None":
    if not _is_loaded():
        return None
    from opentelemetry.trace import get_current_span

    span = get_current_span()
    return span if span.is_recording() else None


def _is_loaded() -> bool:
    return "opentelemetry.sdk.trace" in sys.modules


def _context(trace: str) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": trace})


def _link(trace: str) -> "Link":
    from opentelemetry.trace import Link, get_current_span

    return Link(get_current_span(_context(trace)).get_span_context())


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
