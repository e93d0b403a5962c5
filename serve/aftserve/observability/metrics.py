"""The server's metrics for ``GET /metrics``, in a registry of their own."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics_format
from prometheus_client.registry import Collector

from aftserve.observability.logging import dropped_lines
from aftserve.observability.model_metrics import MODEL, MODEL_METRICS, MetricForm, ModelMetrics

OPENMETRICS = openmetrics_format.CONTENT_TYPE_LATEST
"""Content type of OpenMetrics 1.0."""

_RESPONSES = MetricForm(
    Counter, "aftserve_responses", "Responses, by path, status and model.",
    ["path", "status", MODEL],
)  # fmt: skip
_METRICS = {
    "responses": _RESPONSES,
    "waiting_documents": MetricForm(
        Gauge, "aftserve_waiting_documents", "Documents in the queue."
    ),
    "running_documents": MetricForm(
        Gauge, "aftserve_running_documents", "Documents in the current run of the engine."
    ),
    "idle": MetricForm(
        Gauge, "aftserve_idle", "1 while the engine is idle and has released its memory."
    ),
    "backlog_seconds": MetricForm(
        Gauge, "aftserve_backlog_seconds", "Predicted time until the queue is empty."
    ),
    "server_ready": MetricForm(
        Gauge, "aftserve_server_ready", "1 while the server takes requests for any model."
    ),
}  # fmt: skip


class Metrics:
    """The metrics of the server, and of each of its models; memory is in bytes."""

    responses: Counter
    waiting_documents: Gauge
    running_documents: Gauge
    idle: Gauge
    backlog_seconds: Gauge
    server_ready: Gauge

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="", registry=self.registry)
        self.registry.register(_OutputCollector())
        for attribute, form in _METRICS.items():
            setattr(self, attribute, _create(form, self.registry))
        forms = {
            attribute: form._replace(labels=[MODEL, *form.labels])
            for attribute, form in MODEL_METRICS.items()
        }
        self._of_models = {one: _create(form, self.registry) for one, form in forms.items()}
        self._of_forgotten = {one: _create(form, None) for one, form in forms.items()}
        self._models = dict[str, ModelMetrics]()

    def of(self, name: str) -> ModelMetrics:
        """Return the metrics of the model with this name."""
        if name not in self._models:
            self._models[name] = ModelMetrics(self._of_models, name)
        return self._models[name]

    def forget(self, name: str) -> None:
        """Remove all series of the model with this name; later ones begin again at 0."""
        if (metrics := self._models.pop(name, None)) is not None:
            metrics.move(self._of_forgotten)  # later counts must not begin the series again
        for attribute, form in MODEL_METRICS.items():
            _remove(self._of_models[attribute], [MODEL, *form.labels], name)
        _remove(self.responses, _RESPONSES.labels, name)

    def exposition(self, *, openmetrics: bool = False) -> tuple[bytes, str]:
        """Return all metrics, and the content type."""
        if openmetrics:
            content: bytes = openmetrics_format.generate_latest(  # type: ignore[no-untyped-call]
                self.registry
            )
            return content, OPENMETRICS
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def _create(form: MetricForm, registry: CollectorRegistry | None) -> Counter | Gauge | Histogram:
    options: dict[str, Any] = {} if form.buckets is None else {"buckets": form.buckets}
    return form.kind(form.name, form.text, form.labels, registry=registry, **options)


def _remove(metric: Counter | Gauge | Histogram, labels: Iterable[str], model: str) -> None:
    """Remove the series of a metric that belong to a model."""
    series = {
        tuple(sample.labels[label] for label in labels)
        for family in metric.collect()
        for sample in family.samples
        if sample.labels[MODEL] == model
    }
    for values in series:
        metric.remove(*values)


class _OutputCollector(Collector):
    """A collector that reads at each scrape how much output this process has lost."""

    def collect(self) -> Iterable[CounterMetricFamily]:
        yield CounterMetricFamily(
            "aftserve_log_lines_dropped",
            "Lines of standard output and standard error that were dropped, as nothing read them.",
            value=dropped_lines(),
        )
