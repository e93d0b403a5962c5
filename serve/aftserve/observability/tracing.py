"""Traces by OpenTelemetry, if its SDK is installed and its variables name a receiver.

FastAPI makes the span of a request, below the span in the client's ``traceparent``. This module
makes the spans of the request's stages after they end.
"""

import logging
import os
import threading
import time
from contextvars import ContextVar
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from aftexport import __version__
from aftexport.system.installation import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger("aftserve.tracing")

_NAME = "aftserve"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROPAGATORS = "OTEL_PROPAGATORS"
_CLOSE_SECONDS = 5.0
_MAX_CHARACTERS = 128
"""Maximum characters of an exemplar's labels with their names, by OpenMetrics 1.0."""
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The name of the request that the current task answers."""


class Traces:
    """The spans of requests; none without a provider."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self.provider = provider
        self._tracer = provider.get_tracer(_NAME, __version__) if provider is not None else None

    def record(self, name: str, start: float, end: float, **attributes: float) -> None:
        """Make the span of a stage of the current request."""
        # Start and end are by time.monotonic().
        if self._tracer is None:
            return
        epoch = _epoch()
        span = self._tracer.start_span(
            name,
            attributes={f"{_NAME}.{key}": value for key, value in attributes.items()},
            start_time=int((epoch + start) * 1e9),
        )
        span.end(int((epoch + end) * 1e9))

    def trace_id(self) -> str | None:
        """Return the number of the current request's trace; None without one that is recorded."""
        if self.provider is None:
            return None
        from opentelemetry import trace

        context = trace.get_current_span().get_span_context()
        return f"{context.trace_id:032x}" if context.trace_flags.sampled else None

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        if self.provider is None:
            return
        sending = threading.Thread(target=self.provider.shutdown, daemon=True)
        sending.start()
        sending.join(_CLOSE_SECONDS)
        if sending.is_alive():
            logger.warning("the last traces are lost: not received within %g s", _CLOSE_SECONDS)


def _epoch() -> float:
    """Return the difference of the two clocks, from readings with the least time between them."""
    readings = [(time.monotonic(), time.time(), time.monotonic()) for _ in range(3)]
    before, now, _ = min(readings, key=lambda one: one[2] - one[0])
    return now - before


def configure() -> Traces:
    """Return traces by the standard ``OTEL_*`` variables; none if these name no receiver."""
    kind = os.environ.get(_EXPORTER) or ("otlp" if any(map(os.environ.get, _ENDPOINTS)) else "none")
    if kind == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Traces()
    try:
        return Traces(_provider(kind))
    except ModuleNotFoundError as error:
        logger.warning("no traces: %s; run %s", error, install_command("otel"))
    except ValueError as error:
        logger.warning("no traces: %s", error)
    return Traces()


def leave_out_unknown_propagators() -> None:
    """Remove propagators that are not installed from ``OTEL_PROPAGATORS``, as specified.

    The Python package raises instead when FastAPI imports it, even without traces.
    """
    installed = entry_points(group="opentelemetry_propagator").names
    if not installed:
        return  # OpenTelemetry is not installed either
    names = [name.strip() for name in os.environ.get(_PROPAGATORS, "").split(",")]
    unknown = [name for name in names if name and name.lower() not in {"none", *installed}]
    for name in unknown:
        logger.warning("%s: %r is left out, as it is not installed", _PROPAGATORS, name)
    if kept := [name for name in names if name and name not in unknown]:
        os.environ[_PROPAGATORS] = ",".join(kept)
    else:
        os.environ.pop(_PROPAGATORS, None)  # use the standard's default


def _provider(kind: str) -> "TracerProvider":
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from aftserve.observability.query_redaction import QueryRedaction

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: _NAME}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(QueryRedaction())
    provider.add_span_processor(BatchSpanProcessor(_exporter(kind)))
    return provider


def _exporter(kind: str) -> "SpanExporter":
    match kind:
        case "otlp":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            name = next(filter(os.environ.get, _PROTOCOLS), None)
            if name is not None and os.environ[name] != "http/protobuf":
                raise ValueError(f"{name} must be http/protobuf, got {os.environ[name]}")
            return OTLPSpanExporter()
        case "console":
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            return ConsoleSpanExporter()
        case _:
            raise ValueError(f"{_EXPORTER} must be otlp, console or none, got {kind}")


def exemplar_labels(trace_id: str | None) -> dict[str, str] | None:
    """Return the labels that find the current request in traces and logs; None without any.

    A label that does not fit is left out.
    """
    labels, left = dict[str, str](), _MAX_CHARACTERS
    for name, value in (("trace_id", trace_id), ("request_id", request_id.get())):
        if value is not None and len(name) + len(value) <= left:
            labels[name] = value
            left -= len(name) + len(value)
    return labels or None
