"""What the server counts, for ``GET /metrics``, in a registry of its own."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from aftserve.observability.output_queue import dropped_lines

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
)
"""From a short document at once to a very long one after a queue."""
_TOKENS = tuple(float(1 << power) for power in range(4, 21, 2))
_ERRORS = tuple(10.0**power for power in range(-9, 1))
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Metrics:
    """The instruments. Times are in seconds, memory in bytes."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(namespace="", registry=registry)
        registry.register(_OutputCollector())
        self.responses = Counter(
            "aftserve_responses", "Responses, by path and status.", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self.stage_seconds = Histogram(
            "aftserve_stage_seconds", "Seconds of each stage of an answered document.", ["stage"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.document_tokens = Histogram(
            "aftserve_document_tokens", "Length of the documents answered.",
            buckets=_TOKENS, registry=registry,
        )  # fmt: skip
        self.truncated_documents = Counter(
            "aftserve_truncated_documents", "Documents of which the model saw less than all.",
            registry=registry,
        )  # fmt: skip
        self.predicted_seconds = Counter(
            "aftserve_predicted_seconds", "Sum of what answered requests were predicted to take.",
            registry=registry,
        )  # fmt: skip
        self.actual_seconds = Counter(
            "aftserve_actual_seconds", "Sum of what the same requests took.", registry=registry
        )
        self.prediction_ratio = Histogram(
            "aftserve_actual_to_predicted_ratio", "Actual over predicted time of a request.",
            buckets=_RATIOS, registry=registry,
        )  # fmt: skip
        self.run_documents = Histogram(
            "aftserve_run_documents", "Documents of a run of the engine.",
            buckets=(1, 2, 4, 8, 16), registry=registry,
        )  # fmt: skip
        self.run_seconds = Histogram(
            "aftserve_run_seconds", "Time of a run of the engine.", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.run_tokens = Counter(
            "aftserve_run_tokens", "Tokens run, by whether they are of documents or padding.",
            ["kind"], registry=registry,
        )  # fmt: skip
        self.stopped_runs = Counter(
            "aftserve_stopped_runs", "Runs ended early: nobody waited, or no progress.",
            registry=registry,
        )  # fmt: skip
        self.failed_runs = Counter(
            "aftserve_failed_runs", "Runs in which the engine failed.", registry=registry
        )
        self.parity_checks = Counter(
            "aftserve_parity_checks", "Comparisons with PyTorch, or of a batch with runs alone.",
            ["kind", "verdict"], registry=registry,
        )  # fmt: skip
        self.parity_error = Histogram(
            "aftserve_parity_error", "Error of these, relative to the largest output.", ["kind"],
            buckets=_ERRORS, registry=registry,
        )  # fmt: skip
        self.skipped_checks = Counter(
            "aftserve_skipped_parity_checks", "Live documents drawn for a check that was not made.",
            registry=registry,
        )  # fmt: skip
        self.reloads = Counter(
            "aftserve_reloads", "Bundles loaded anew, by whether they are served.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.bundle = Gauge(
            "aftserve_bundle_info", "1 for the digest of the bundle that is served.", ["bundle"],
            registry=registry,
        )  # fmt: skip
        self.bundle_loaded = Gauge(
            "aftserve_bundle_loaded_timestamp_seconds", "When it was loaded.", registry=registry
        )
        self.waiting_documents = Gauge(
            "aftserve_waiting_documents", "Documents in the queue.", registry=registry
        )
        self.running_documents = Gauge(
            "aftserve_running_documents", "Documents the engine is at.", registry=registry
        )
        self.idle = Gauge(
            "aftserve_idle", "1 while the engine keeps no memory of runs, having none to make.",
            registry=registry,
        )  # fmt: skip
        self.backlog_seconds = Gauge(
            "aftserve_backlog_seconds", "Predicted time until the queue is empty.",
            registry=registry,
        )  # fmt: skip
        self.pace = Gauge(
            "aftserve_pace", "Time of the last runs, over what was calibrated.", registry=registry
        )
        self.ready = Gauge("aftserve_ready", "1 while requests are wanted.", registry=registry)

    def observe_run(self, tokens: Sequence[int], seconds: float) -> None:
        """Counts a run of documents of so many ``tokens``, padded to the longest."""
        self.run_documents.observe(len(tokens))
        self.run_seconds.observe(seconds)
        self.run_tokens.labels("document").inc(sum(tokens))
        self.run_tokens.labels("padding").inc(len(tokens) * max(tokens) - sum(tokens))

    def observe_prediction(self, predicted: float, actual: float) -> None:
        """Counts an answered request."""
        self.predicted_seconds.inc(predicted)
        self.actual_seconds.inc(actual)
        self.prediction_ratio.observe(actual / predicted)

    def observe_bundle(self, digest: str, since: float) -> None:
        """Notes which bundle is served from now on, loaded at a Unix time."""
        self.bundle.clear()
        self.bundle.labels(digest).set(1)
        self.bundle_loaded.set(since)

    def exposition(self) -> bytes:
        """Everything, in the text format of Prometheus."""
        return generate_latest(self.registry)


class _OutputCollector(Collector):
    """Reads at each scrape how much output this process has lost."""

    def collect(self) -> Iterable[CounterMetricFamily]:
        yield CounterMetricFamily(
            "aftserve_log_lines_dropped",
            "Lines of standard output and error that were not written, as nothing read them.",
            value=dropped_lines(),
        )
