"""The server's metrics for ``GET /metrics``, in a registry of their own."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics_format
from prometheus_client.registry import Collector

from aftserve.observability.inference_stats import InferenceStats
from aftserve.observability.output_queue import dropped_lines

OPENMETRICS = openmetrics_format.CONTENT_TYPE_LATEST
"""Content type of OpenMetrics 1.0."""
# From a short document without a queue to a very long one after a queue.
_FRACTIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
_SECONDS = (*_FRACTIONS, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = tuple(float(1 << power) for power in range(4, 21, 2))
_ERRORS = tuple(10.0**power for power in range(-9, 1))
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_DOCUMENTS = (1, 2, 4, 8, 16)


class _Metric(NamedTuple):
    kind: type[Counter | Gauge | Histogram]
    name: str
    text: str
    labels: Sequence[str] = ()
    buckets: Sequence[float] | None = None


_METRICS = {
    "responses": _Metric(
        Counter, "aftserve_responses", "Responses, by path and status.", ["path", "status"]
    ),
    "stage_seconds": _Metric(
        Histogram, "aftserve_stage_seconds", "Seconds of each stage of an answered document.",
        ["stage"], _SECONDS,
    ),
    "document_tokens": _Metric(
        Histogram, "aftserve_document_tokens", "Length of answered documents.", (), _TOKENS
    ),
    "truncated_documents": _Metric(
        Counter, "aftserve_truncated_documents", "Documents of which the model saw only a part."
    ),
    "predicted_seconds": _Metric(
        Counter, "aftserve_predicted_seconds", "Predicted time of all answered requests."
    ),
    "actual_seconds": _Metric(
        Counter, "aftserve_actual_seconds", "Actual time of all answered requests."
    ),
    "prediction_ratio": _Metric(
        Histogram, "aftserve_actual_to_predicted_ratio", "Actual over predicted time of a request.",
        (), _RATIOS,
    ),
    "run_documents": _Metric(
        Histogram, "aftserve_run_documents", "Documents in a run of the engine.", (), _DOCUMENTS
    ),
    "run_seconds": _Metric(
        Histogram, "aftserve_run_seconds", "Time of a run of the engine.", (), _SECONDS
    ),
    "run_tokens": _Metric(
        Counter, "aftserve_run_tokens", "Tokens of runs, by kind: document or padding.", ["kind"]
    ),
    "stopped_runs": _Metric(
        Counter, "aftserve_stopped_runs", "Runs stopped: all clients left, or no progress."
    ),
    "failed_runs": _Metric(
        Counter, "aftserve_failed_runs", "Runs in which the engine failed."
    ),
    "parity_checks": _Metric(
        Counter, "aftserve_parity_checks",
        "Comparisons with PyTorch, or of a batch with single runs.", ["kind", "verdict"],
    ),
    "parity_error": _Metric(
        Histogram, "aftserve_parity_error", "Error of comparisons, relative to the largest output.",
        ["kind"], _ERRORS,
    ),
    "skipped_checks": _Metric(
        Counter, "aftserve_skipped_parity_checks", "Sampled documents that were not checked."
    ),
    "reloads": _Metric(
        Counter, "aftserve_reloads", "Reloads of the bundle, by outcome: served or refused.",
        ["outcome"],
    ),
    "bundle": _Metric(
        Gauge, "aftserve_bundle_info", "1 for the digest of the active bundle.", ["bundle"]
    ),
    "bundle_loaded": _Metric(
        Gauge, "aftserve_bundle_loaded_timestamp_seconds", "Time when the bundle was loaded."
    ),
    "waiting_documents": _Metric(
        Gauge, "aftserve_waiting_documents", "Documents in the queue."
    ),
    "running_documents": _Metric(
        Gauge, "aftserve_running_documents", "Documents in the current run of the engine."
    ),
    "idle": _Metric(
        Gauge, "aftserve_idle", "1 while the engine is idle and has released its memory."
    ),
    "backlog_seconds": _Metric(
        Gauge, "aftserve_backlog_seconds", "Predicted time until the queue is empty."
    ),
    "slowdown": _Metric(
        Gauge, "aftserve_pace", "Time of the last runs over their calibrated time."
    ),
    "ready": _Metric(Gauge, "aftserve_ready", "1 while the server takes requests."),
}  # fmt: skip


class Metrics:
    """The server's metrics; times are in seconds, memory in bytes.

    Attributes:
        inference: the statistics of the Open Inference Protocol.
    """

    responses: Counter
    stage_seconds: Histogram
    document_tokens: Histogram
    truncated_documents: Counter
    predicted_seconds: Counter
    actual_seconds: Counter
    prediction_ratio: Histogram
    run_documents: Histogram
    run_seconds: Histogram
    run_tokens: Counter
    stopped_runs: Counter
    failed_runs: Counter
    parity_checks: Counter
    parity_error: Histogram
    skipped_checks: Counter
    reloads: Counter
    bundle: Gauge
    bundle_loaded: Gauge
    waiting_documents: Gauge
    running_documents: Gauge
    idle: Gauge
    backlog_seconds: Gauge
    slowdown: Gauge
    ready: Gauge

    def __init__(self) -> None:
        self.inference = InferenceStats()
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="", registry=self.registry)
        self.registry.register(_OutputCollector())
        for attribute, (kind, name, text, labels, buckets) in _METRICS.items():
            options: dict[str, Any] = {} if buckets is None else {"buckets": buckets}
            setattr(self, attribute, kind(name, text, labels, registry=self.registry, **options))

    def observe_run(self, tokens: Sequence[int], seconds: float) -> None:
        """Count a run of documents of these lengths, padded to the longest."""
        self.inference.runs[len(tokens)].add(seconds)
        self.run_documents.observe(len(tokens))
        self.run_seconds.observe(seconds)
        self.run_tokens.labels("document").inc(sum(tokens))
        self.run_tokens.labels("padding").inc(len(tokens) * max(tokens) - sum(tokens))

    def observe_prediction(self, predicted: float, actual: float) -> None:
        """Count the predicted and the actual time of an answered request."""
        self.predicted_seconds.inc(predicted)
        self.actual_seconds.inc(actual)
        self.prediction_ratio.observe(actual / predicted)

    def observe_bundle(self, digest: str, since: float) -> None:
        """Set the active bundle, and the Unix time when it was loaded."""
        self.bundle.clear()
        self.bundle.labels(digest).set(1)
        self.bundle_loaded.set(since)

    def exposition(self, *, openmetrics: bool = False) -> tuple[bytes, str]:
        """Return all metrics, and the content type.

        Args:
            openmetrics: whether the format is OpenMetrics, which has exemplars, and not the text
                format of Prometheus.
        """
        if openmetrics:
            content: bytes = openmetrics_format.generate_latest(  # type: ignore[no-untyped-call]
                self.registry
            )
            return content, OPENMETRICS
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class _OutputCollector(Collector):
    """A collector that reads at each scrape how much output this process has lost."""

    def collect(self) -> Iterable[CounterMetricFamily]:
        yield CounterMetricFamily(
            "aftserve_log_lines_dropped",
            "Lines of standard output and standard error that were dropped, as nothing read them.",
            value=dropped_lines(),
        )
