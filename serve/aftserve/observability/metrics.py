"""The metrics of the server and of each model for ``GET /metrics``, in a registry of their own."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics_format
from prometheus_client.registry import Collector

from aftserve.observability.logging import dropped_lines

MODEL = "model"
"""The label with the name of the model; empty in responses that belong to no model."""
M = TypeVar("M", Counter, Gauge, Histogram)
"""The kind of a metric."""
# From a short document without a queue to a very long one after a queue.
_FRACTIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
_SECONDS = (*_FRACTIONS, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = tuple(float(1 << power) for power in range(4, 21, 2))
_ERRORS = tuple(10.0**power for power in range(-9, 1))
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_DOCUMENTS = (1, 2, 4, 8, 16)


class MetricForm(NamedTuple):
    """The form of a metric."""

    kind: type[Counter | Gauge | Histogram]
    name: str  # without the suffix of its kind
    text: str
    labels: Sequence[str] = ()  # for the metrics of a model, those besides the model
    buckets: Sequence[float] | None = None  # upper bounds of a histogram


MODEL_METRICS = {
    "stage_seconds": MetricForm(
        Histogram, "aftserve_stage_seconds", "Seconds of each stage of an answered document.",
        ["stage"], _SECONDS,
    ),
    "document_tokens": MetricForm(
        Histogram, "aftserve_document_tokens", "Length of answered documents.", (), _TOKENS
    ),
    "truncated_documents": MetricForm(
        Counter, "aftserve_truncated_documents", "Documents of which the model saw only a part."
    ),
    "predicted_seconds": MetricForm(
        Counter, "aftserve_predicted_seconds", "Predicted time of all answered requests."
    ),
    "actual_seconds": MetricForm(
        Counter, "aftserve_actual_seconds", "Actual time of all answered requests."
    ),
    "prediction_ratio": MetricForm(
        Histogram, "aftserve_actual_to_predicted_ratio", "Actual over predicted time of a request.",
        (), _RATIOS,
    ),
    "run_documents": MetricForm(
        Histogram, "aftserve_run_documents", "Documents in a run of the engine.", (), _DOCUMENTS
    ),
    "run_seconds": MetricForm(
        Histogram, "aftserve_run_seconds", "Time of a run of the engine.", (), _SECONDS
    ),
    "run_tokens": MetricForm(
        Counter, "aftserve_run_tokens", "Tokens of runs, by kind: document or padding.", ["kind"]
    ),
    "stopped_runs": MetricForm(
        Counter, "aftserve_stopped_runs", "Runs stopped: all clients left, or no progress."
    ),
    "failed_runs": MetricForm(
        Counter, "aftserve_failed_runs", "Runs in which the engine failed."
    ),
    "parity_checks": MetricForm(
        Counter, "aftserve_parity_checks",
        "Comparisons with PyTorch, or of a batch with single runs.", ["kind", "verdict"],
    ),
    "parity_error": MetricForm(
        Histogram, "aftserve_parity_error", "Error of comparisons, relative to the largest output.",
        ["kind"], _ERRORS,
    ),
    "skipped_checks": MetricForm(
        Counter, "aftserve_skipped_parity_checks", "Sampled documents that were not checked."
    ),
    "reloads": MetricForm(
        Counter, "aftserve_reloads", "Reloads of the bundle, by outcome: served or refused.",
        ["outcome"],
    ),
    "bundle": MetricForm(
        Gauge, "aftserve_bundle_info", "1 for the digest of the active bundle.", ["bundle"]
    ),
    "bundle_loaded": MetricForm(
        Gauge, "aftserve_bundle_loaded_timestamp_seconds", "Time when the bundle was loaded."
    ),
    "slowdown": MetricForm(
        Gauge, "aftserve_pace", "Time of the last runs over their calibrated time."
    ),
    "ready": MetricForm(Gauge, "aftserve_ready", "1 while the model takes requests."),
}  # fmt: skip
"""The metrics of every model by the attribute of ``ModelMetrics``."""


class ModelSeries(Generic[M]):
    """The series of one metric that belong to one model."""

    def __init__(self, metric: M, model: str) -> None:
        self._metric: M = metric
        self._model = model

    def labels(self, *values: str) -> M:
        """Return the series with these values of the other labels."""
        series: M = self._metric.labels(self._model, *values)
        return series

    def remove(self, *values: str) -> None:
        """Remove the series with these values of the other labels."""
        self._metric.remove(self._model, *values)


class ModelMetrics:
    """The metrics of one model; times are in seconds."""

    stage_seconds: ModelSeries[Histogram]
    document_tokens: Histogram
    truncated_documents: Counter
    predicted_seconds: Counter
    actual_seconds: Counter
    prediction_ratio: Histogram
    run_documents: Histogram
    run_seconds: Histogram
    run_tokens: ModelSeries[Counter]
    stopped_runs: Counter
    failed_runs: Counter
    parity_checks: ModelSeries[Counter]
    parity_error: ModelSeries[Histogram]
    skipped_checks: Counter
    reloads: ModelSeries[Counter]
    bundle: ModelSeries[Gauge]
    bundle_loaded: Gauge
    slowdown: Gauge
    ready: Gauge

    def __init__(self, metrics: Mapping[str, Counter | Gauge | Histogram], model: str) -> None:
        self.inference = InferenceStats()
        self._model = model
        self._digest: str | None = None
        self.move(metrics)

    def move(self, metrics: Mapping[str, Counter | Gauge | Histogram]) -> None:
        """Count in other metrics from now on."""
        for attribute, form in MODEL_METRICS.items():
            series = ModelSeries(cast(Counter, metrics[attribute]), self._model)
            setattr(self, attribute, series if form.labels else series.labels())

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
        if self._digest is not None:
            self.bundle.remove(self._digest)
        self._digest = digest
        self.bundle.labels(digest).set(1)
        self.bundle_loaded.set(since)


@dataclass
class TotalTime:
    """A number of events, and the sum of their times."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count an event."""
        self.count += 1
        self.seconds += seconds


@dataclass
class InferenceStats:
    """Requests and runs, of every interface of the server."""

    last_request: float = 0.0  # Unix time of the last one answered or failed; 0 before it
    documents: int = 0
    answered: TotalTime = field(default_factory=TotalTime)  # from tokenization on
    # Refused by the queue, failed in the engine, or given up.
    failed: TotalTime = field(default_factory=TotalTime)
    # Stages of the answered requests, each by its longest document.
    queue: TotalTime = field(default_factory=TotalTime)
    tokenize: TotalTime = field(default_factory=TotalTime)
    run: TotalTime = field(default_factory=TotalTime)
    finish: TotalTime = field(default_factory=TotalTime)
    # By their number of documents.
    runs: dict[int, TotalTime] = field(default_factory=lambda: defaultdict(TotalTime))

    def add_answered(
        self, documents: int, *, tokenize: float, queue: float, run: float, finish: float
    ) -> None:
        """Count an answered request by the seconds of its stages."""
        self.last_request = time.time()
        self.documents += documents
        self.answered.add(tokenize + queue + run + finish)
        self.tokenize.add(tokenize)
        self.queue.add(queue)
        self.run.add(run)
        self.finish.add(finish)

    @contextmanager
    def counting_failures(self, began: float) -> Iterator[None]:
        """Count a request as failed if it raises, or is cancelled at the client's deadline."""
        # began: by time.monotonic()
        try:
            yield
        except BaseException:
            self.last_request = time.time()
            self.failed.add(time.monotonic() - began)
            raise


OPENMETRICS = openmetrics_format.CONTENT_TYPE_LATEST
"""Content type of OpenMetrics 1.0."""

_RESPONSE_LABELS = ("path", "status", MODEL)


class Metrics:
    """The metrics of the server, and of each of its models; memory is in bytes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="", registry=self.registry)
        self.registry.register(_OutputCollector())
        self.responses = Counter(
            "aftserve_responses",
            "Responses, by path, status and model.",
            _RESPONSE_LABELS,
            registry=self.registry,
        )
        gauge = partial(Gauge, registry=self.registry)
        self.waiting_documents = gauge("aftserve_waiting_documents", "Documents in the queue.")
        self.running_documents = gauge(
            "aftserve_running_documents", "Documents in the current run of the engine."
        )
        self.idle = gauge(
            "aftserve_idle", "1 while the engine is idle and has released its memory."
        )
        self.backlog_seconds = gauge(
            "aftserve_backlog_seconds", "Predicted time until the queue is empty."
        )
        self.server_ready = gauge(
            "aftserve_server_ready", "1 while the server takes requests for any model."
        )
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
        _remove(self.responses, _RESPONSE_LABELS, name)

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
