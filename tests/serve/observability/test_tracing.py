"""Traces that a collector on the loopback interface receives."""

import gzip
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clients import http
from commands import run_python
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from servers import Stub, listening, serving

from aftexport.system.installation import install_command
from aftserve.observability.query_redaction import QueryRedaction, redacted

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OTHER_TRACE = TRACE[::-1]
SECRET = "sk-a5fe"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Handler(Stub):
        def post(self, body: bytes) -> None:
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.answer(200)

    with listening(Handler) as address:
        yield address, received


def attributes(span: Span) -> dict[str, object]:
    return {
        item.key: getattr(item.value, str(item.value.WhichOneof("value")))
        for item in span.attributes
    }


def test_request_span_has_stage_spans(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as (address, received):
        monkeypatch.setenv(ENDPOINT, address)
        with serving(bundle_folder, tmp_path / "log") as (server, process):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            body = {"texts": ["An invoice.", "abc"]}
            sent = time.time_ns()
            answer = http.post(f"{server}/infer?evidence=0", json=body, headers=headers)
            assert answer.status_code == 200
            refused = {"traceparent": f"00-{OTHER_TRACE}-{PARENT}-01"}
            url = f"{server}/infer?evidence=0&api_key={SECRET}&{SECRET}"
            assert http.post(url, json=body, headers=refused).status_code == 422
            accepted = {"Accept": "application/openmetrics-text"}
            metrics = http.get(f"{server}/metrics", headers=accepted).text
            assert f'trace_id="{TRACE}"' in metrics
            process.terminate()  # the server sends its last spans as it ends
            assert process.wait(30) == 0
    assert not [request for request in received if SECRET.encode() in request.SerializeToString()]
    assert SECRET not in (tmp_path / "log").read_text("utf-8")
    resources = [group for request in received for group in request.resource_spans]
    names = {item.key: item.value.string_value for item in resources[0].resource.attributes}
    assert names["service.name"] == "aftserve"
    every = [span for group in resources for scope in group.scope_spans for span in scope.spans]
    spans = [span for span in every if span.trace_id.hex() == TRACE]
    (request,) = [span for span in spans if span.parent_span_id.hex() == PARENT]
    assert attributes(request)["http.route"] == "/infer"
    assert attributes(request)["url.query"] == "evidence=0"
    (other,) = [span for span in every if span.trace_id.hex() == OTHER_TRACE]
    assert attributes(other)["url.query"] == "evidence=0&REDACTED"
    stages = [span for span in spans if span is not request]
    assert {span.parent_span_id for span in stages} == {request.span_id}
    assert sorted(span.name for span in stages) == [
        "infer", "infer", "queue", "queue", "receive", "tokenize"
    ]  # fmt: skip
    for span in stages:
        slack = 5_000_000  # nanoseconds between two clocks
        # The stage starts at the first byte, and the server may be busy before the request's span.
        earliest = sent if span.name == "receive" else request.start_time_unix_nano
        assert earliest - slack <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano + slack
    found = {span.name: attributes(span) for span in stages}
    assert found["tokenize"] == {"aftserve.documents": 2, "aftserve.tokens": 14}
    infers = [attributes(span) for span in stages if span.name == "infer"]
    assert sorted(infer["aftserve.tokens"] for infer in infers) == [3, 11]  # type: ignore[type-var]
    timings = answer.json()["results"][0]["timings"]
    for infer in infers:
        assert infer["aftserve.batch_documents"] in (1, 2)
        assert infer["aftserve.predicted_seconds"] == timings["predicted_seconds"]
        assert infer["aftserve.actual_seconds"] > 0  # type: ignore[operator]


def exported(named: dict[str, str]) -> dict[str, Any]:
    """Return the attributes of a span after their redaction."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(QueryRedaction())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("a").start_span("a", attributes=named).end()
    (span,) = exporter.get_finished_spans()
    return {**(span.attributes or {})}


@pytest.mark.parametrize(
    ("query", "left"),
    [
        ("", ""),
        ("evidence=3", "evidence=3"),
        ("evidence=3&evidence_tokens=256", "evidence=3&evidence_tokens=256"),
        (f"evidence=3&key={SECRET}", "evidence=3&REDACTED"),
        (f"{SECRET}", "REDACTED"),
        (f"{SECRET}=", "REDACTED"),
        (f"evidence={SECRET}", "REDACTED"),
        (f"Evidence=1&token={SECRET}&x=", "REDACTED"),
        ("access%5Ftoken=a&evidence=%31", "evidence=1&REDACTED"),
    ],
)
def test_unknown_query_parameters_are_redacted(query: str, left: str) -> None:
    assert redacted(query) == left
    named = {"url.query": query, "url.full": f"http://a/infer?{query}", "http.target": "/infer"}
    expected = {"url.query": left, "url.full": f"http://a/infer?{left}", "http.target": "/infer"}
    assert exported(named) == expected


@pytest.mark.parametrize("path", ["/infer?key=s", "/infer%3Fkey=s", "/infer;key=s", "/a%3bs"])
def test_query_behind_encoded_mark_is_redacted(path: str) -> None:
    for value in exported({"url.path": path, "http.target": path}).values():
        assert "key=s" not in str(value)
        assert str(value).endswith("REDACTED")


@pytest.mark.slow
def test_silent_collector_does_not_block_shutdown(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
        log = tmp_path / "log"
        with serving(bundle_folder, log, "--drain-seconds", "0") as (server, process):
            assert http.post(f"{server}/infer", json={"text": "abc"}).status_code == 200
            process.terminate()
            assert process.wait(60) == 0
    assert "the last traces are lost" in log.read_text("utf-8")


CONFIGURED = "from aftserve.observability.tracing import configure; print(configure().provider)"
LOADED = (
    "; import sys; print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
)
NO_SDK = "import sys; sys.modules['opentelemetry.sdk'] = None; "
ANY_ENDPOINT = {ENDPOINT: "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("before", "variables", "problem"),
    [
        ("", {}, ""),
        ("", {**ANY_ENDPOINT, "OTEL_SDK_DISABLED": "true"}, ""),
        (NO_SDK, ANY_ENDPOINT, install_command("otel")),
        (NO_SDK, {"OTEL_TRACES_EXPORTER": "zipkin"}, install_command("otel")),
        ("", {"OTEL_TRACES_EXPORTER": "zipkin"}, "zipkin"),
        ("", {**ANY_ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        ("", {**ANY_ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc"),
    ],
)
def test_server_without_traces_says_why(
    before: str, variables: dict[str, str], problem: str, tmp_path: Path
) -> None:
    """Without a receiver, the SDK is not even imported."""
    program = f"{before}from aftserve.server import Server; {CONFIGURED}{LOADED}"
    outcome = run_python("-c", program, cwd=tmp_path, **variables)
    assert outcome.code == 0, outcome.err
    provider, loaded = outcome.out.splitlines()
    assert provider == "None"
    assert problem in outcome.err
    assert problem or loaded == "[]"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("b3", "traceparent tracestate baggage"),
        ("b3, tracecontext,", "traceparent tracestate"),
        ("jaeger,none", ""),
        ("", "traceparent tracestate baggage"),
    ],
)
def test_missing_propagator_is_left_out(given: str, left: str, tmp_path: Path) -> None:
    fields = "from opentelemetry import propagate; print(*propagate.get_global_textmap().fields)"
    outcome = run_python(
        "-c", f"from aftserve.cli import main; assert main(['key', 'a']) == 0; {fields}",
        cwd=tmp_path, OTEL_PROPAGATORS=given,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert set(outcome.out.splitlines()[-1].split()) == set(left.split())
    unknown = [name for name in ("b3", "jaeger") if name in given]
    assert all(f"'{name}' is left out" in outcome.err for name in unknown)
    assert len(outcome.err.splitlines()) == len(unknown)
