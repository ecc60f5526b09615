"""Traces: a span a request, linked to the client's and to the worker's, without prompts."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from carpool.config import ServeSettings
from carpool.errors import PipelineFailed, Rejected, WorkerLost
from carpool.jobs.runner import Runner
from carpool.jobs.store import JobStore
from carpool.server.app import create_app
from carpool.telemetry import tracing
from carpool.telemetry.tracing import Tracing
from carpool.types import CheckedRequest
from support.app import CARD, Grey, Lone, client_of, fleet_of, idle_jobs
from support.endpoints import ENDPOINT
from support.server_process import DRAW, MODEL_ID, body, eventually, serving

JOB = CheckedRequest("req-1", 7, {"prompt": "a secret wish"})
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
LIFE: dict[str, Any] = {
    "status": "ok", "error": None, "step": 3, "steps": 3, "queued_s": 2.0, "total_s": 10.0,
    "phases": [
        {"phase": name, "start_s": start_s, "duration_s": duration_s, "forwards": 3,
         "others_mean": 1.5, "waited_for_s": {"engine": 0.25}}
        for name, start_s, duration_s in [("encode", 2.0, 1.0), ("denoise", 3.0, 6.0)]
    ],
}  # fmt: skip


class Spans:
    """Tracing that keeps its spans."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracing = Tracing(provider)

    def all(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._kept.get_finished_spans()}


def ids(span: ReadableSpan) -> tuple[str, str | None]:
    assert span.context is not None
    parent = None if span.parent is None else f"{span.parent.span_id:016x}"
    return f"{span.context.trace_id:032x}", parent


def test_a_request_is_a_child_of_the_clients_span_and_the_parent_of_the_workers() -> None:
    front, worker = Spans(), Spans()

    with front.tracing.request({"traceparent": TRACEPARENT}, "req-9"):
        tracing.asked("flux", [7, 8], "image")
        tracing.used(5, 64)
        trace = tracing.carried()
    worker.tracing.ended(trace, JOB, LIFE, ended_s=1010.0)

    span = front.all()["generate_content flux"]
    assert ids(span) == (TRACE_ID, PARENT_ID)
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "generate_content", "gen_ai.provider.name": "carpool",
        "gen_ai.output.type": "image", "gen_ai.request.model": "flux",
        "gen_ai.response.model": "flux", "gen_ai.response.id": "req-9", "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2, "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 64,
    }  # fmt: skip
    whole = worker.all()["generate_content text-to-image"]
    assert span.context is not None
    assert ids(whole) == (TRACE_ID, f"{span.context.span_id:016x}")


def test_the_phases_of_a_life_lie_where_they_were_inside_of_it() -> None:
    worker = Spans()

    worker.tracing.ended("", JOB, LIFE, ended_s=1010.0)

    spans = worker.all()
    whole = spans["generate_content text-to-image"]
    seconds = {
        name: ((s.start_time or 0) / 1e9, (s.end_time or 0) / 1e9) for name, s in spans.items()
    }
    assert seconds == {
        "generate_content text-to-image": (1000.0, 1010.0),
        "queue": (1000.0, 1002.0),
        "encode": (1002.0, 1003.0),
        "denoise": (1003.0, 1009.0),
    }
    assert whole.context is not None
    for name in ("queue", "encode", "denoise"):
        assert ids(spans[name])[1] == f"{whole.context.span_id:016x}"
    assert (spans["denoise"].attributes or {})["carpool.forwards"] == 3
    assert (spans["denoise"].attributes or {})["carpool.waited_for_engine_s"] == 0.25
    assert (whole.attributes or {})["carpool.queue_s"] == 2.0


def test_denoising_is_linked_to_those_it_was_shared_with_and_tells_its_forwards() -> None:
    worker = Spans()
    company = {"others": [TRACEPARENT], "forwards": [{"at_s": 4.0, "rows": 4, "requests": 2}]}

    worker.tracing.ended("", JOB, LIFE, company, ended_s=1010.0)

    spans = worker.all()
    [link] = spans["denoise"].links
    assert f"{link.context.trace_id:032x}-{link.context.span_id:016x}" == f"{TRACE_ID}-{PARENT_ID}"
    [event] = spans["denoise"].events
    assert (event.name, event.timestamp) == ("forward", 1004 * 10**9)
    assert dict(event.attributes or {}) == {"carpool.rows": 4, "carpool.requests": 2}
    assert not spans["encode"].links
    assert not spans["encode"].events


class Carrier(Grey):
    """Keeps what traces it would carry to its worker, which dies under the first."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open.set()
        self.carried: list[str] = []

    async def submit(self, *args: Any, **options: Any) -> Any:
        self.carried.append(tracing.carried())
        if len(self.carried) == 1:
            raise WorkerLost("it died")
        return await super().submit(*args, **options)


def test_every_run_of_a_job_belongs_to_the_request_that_brought_it_also_after_a_restart(
    tmp_path: Path,
) -> None:
    spans, worker = Spans(), Carrier()

    async def before() -> str:
        with closing(JobStore(tmp_path)) as store:
            runner = Runner(store, worker, {}, model=lambda: CARD.id, max_running=1)
            app = create_app(fleet_of(worker), ServeSettings(), runner, traces=spans.tracing)
            async with client_of(app) as client:
                sent = {"prompt": "a secret wish", "background_job": True, "n": 2, "seed": 7}
                headers = {"traceparent": TRACEPARENT}
                answer = await client.post(ENDPOINT, json=sent, headers=headers)
            job_id: str = answer.json()["id"]
            return job_id

    async def after(job_id: str) -> None:
        with closing(JobStore(tmp_path)) as store:
            writers = {"image": lambda *_: None}
            runner = Runner(store, worker, writers, model=lambda: CARD.id, max_running=1)
            create_app(fleet_of(worker), ServeSettings(), runner, traces=spans.tracing)
            running = asyncio.create_task(runner.run())
            try:
                await runner.ended(job_id)
            finally:
                running.cancel()
                await runner.stop()

    job_id = asyncio.run(before())
    asyncio.run(after(job_id))

    [span] = spans.all().values()
    assert ids(span) == (TRACE_ID, PARENT_ID)
    attributes = dict(span.attributes or {})
    assert span.name == "generate_content grey"
    assert (attributes["carpool.job"], attributes["gen_ai.request.seed"]) == (job_id, 7)
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.output.type"] == "image"
    assert "wish" not in span.to_json()
    assert span.context is not None
    assert set(worker.carried) == {f"00-{TRACE_ID}-{span.context.span_id:016x}-01"}
    assert len(worker.carried) >= 3  # twice one part at least, and the other


@pytest.mark.parametrize(
    ("error", "code", "is_error"),
    [
        (Rejected("wrong: a secret wish"), "invalid_value", False),
        (PipelineFailed("a secret wish"), "internal_error", True),
        (ValueError("a secret wish"), "internal_error", True),
    ],
    ids=["theirs", "ours", "unforeseen"],
)
def test_a_failure_is_told_by_its_code_only(error: Exception, code: str, is_error: bool) -> None:
    spans = Spans()

    with pytest.raises(type(error)), spans.tracing.request({}, "req-9"):
        raise error

    span = spans.all()["generate_content"]
    assert (span.attributes or {})["error.type"] == code
    assert (span.status.status_code == StatusCode.ERROR) is is_error
    assert "secret" not in span.to_json()


def test_a_failed_life_is_an_error_and_a_cancelled_one_is_not() -> None:
    for status, code, is_error in (("failed", "out_of_memory", True), ("cancelled", "x", False)):
        spans = Spans()
        spans.tracing.ended("", JOB, {**LIFE, "status": status, "error": code})

        whole = spans.all()["generate_content text-to-image"]
        assert (whole.attributes or {})["error.type"] == code
        assert (whole.status.status_code == StatusCode.ERROR) is is_error


def test_without_a_provider_nothing_is_written_and_nothing_carried() -> None:
    off = Tracing()
    with off.request({"traceparent": TRACEPARENT}, "req-9"):
        tracing.asked("flux", [7], "image")
        assert tracing.carried() == ""
    off.ended("", JOB, LIFE)
    tracing.take_up("")
    off.stop()


async def test_the_front_spans_requests_for_work_and_nothing_else() -> None:
    spans = Spans()
    app = create_app(
        fleet_of(Lone()), ServeSettings(), idle_jobs(), traces=spans.tracing
    )  # fmt: skip

    async with client_of(app) as client:
        for path in ("/health", "/v1/models", "/stats"):
            await client.get(path)
        assert not spans.all()
        headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
        await client.post(ENDPOINT, json={"prompt": "a"}, headers=headers)

    [span] = spans.all().values()
    assert ids(span) == (TRACE_ID, PARENT_ID)
    assert (span.attributes or {})["error.type"] == "starting"
    assert (span.attributes or {})["gen_ai.response.id"] == "mine"


@pytest.mark.parametrize(
    ("flag", "environ", "is_wanted"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"OTEL_SERVICE_NAME": "x"}, False),
        (False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        (False, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        (True, {"OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_traces_are_sent_when_somebody_says_so(
    flag: bool, environ: dict[str, str], is_wanted: bool
) -> None:
    assert tracing.is_wanted(flag, environ) is is_wanted


def test_the_library_is_not_imported_unless_traces_are_wanted() -> None:
    code = (
        "import carpool.server.run, carpool.worker.process, carpool.telemetry.tracing as t, sys;"
        "t.carried(); t.Tracing().ended('', None, {}); print('opentelemetry.sdk' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


# With a collector


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A server that takes spans as OpenTelemetry's collector does; gives its URL and the spans."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            sent = ExportTraceServiceRequest.FromString(content)
            for one in sent.resource_spans:
                resource = {a.key: a.value.string_value for a in one.resource.attributes}
                spans.extend((resource, span) for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quietly."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", spans
        finally:
            server.shutdown()
            thread.join()


TOGETHER = ("--batching-mode=dynamic", "--batching-max-size=2", "--batching-delay-ms=60000")


@pytest.mark.timeout(150)
def test_a_server_sends_a_trace_for_each_request_and_links_those_that_rode_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = TRACEPARENT.replace(TRACE_ID, "f" * 32)
    with collector() as (url, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "pictures")
        with serving(*TOGETHER) as server, server.client() as client:
            job = client.post(
                ENDPOINT, json=body(background_job=True), headers={"traceparent": other}
            )
            answer = client.post(ENDPOINT, json=body(), headers={"traceparent": TRACEPARENT})
            assert (job.status_code, answer.status_code) == (202, 200)
        # it has ended by now, and sent what was left

        eventually(lambda: len(spans) >= 12, 5, "all spans have come")

    assert {resource["service.name"] for resource, _ in spans} == {"pictures"}
    by_trace: dict[str, dict[str, Any]] = {TRACE_ID: {}, "f" * 32: {}}
    for resource, span in spans:
        by_trace[span.trace_id.hex()][span.name] = resource["carpool.process"], span
    by_name, of_job = by_trace.values()
    assert by_name.keys() == of_job.keys()
    assert of_job["generate_content text-to-image"][1].parent_span_id == (
        of_job[f"generate_content {MODEL_ID}"][1].span_id
    )
    for mine, others in ((by_name, of_job), (of_job, by_name)):
        [link] = mine["denoise"][1].links
        assert link.span_id == others[f"generate_content {MODEL_ID}"][1].span_id
        assert len(mine["denoise"][1].events) == DRAW["num_inference_steps"]
    process, front = by_name[f"generate_content {MODEL_ID}"]
    assert (process, front.parent_span_id.hex()) == ("front", PARENT_ID)
    process, whole = by_name["generate_content text-to-image"]
    assert (process, whole.parent_span_id) == ("worker", front.span_id)
    for name in ("queue", "encode", "denoise", "decode"):
        process, phase = by_name[name]
        assert (process, phase.parent_span_id) == ("worker", whole.span_id)
        slack_ns = 50_000_000
        assert front.start_time_unix_nano - slack_ns <= phase.start_time_unix_nano
        assert phase.end_time_unix_nano <= front.end_time_unix_nano + slack_ns
    assert "red circle" not in json.dumps([str(span) for _, span in spans])
