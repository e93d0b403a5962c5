"""The metrics of several models in one registry."""

import gc
import weakref

from prometheus_client.parser import text_string_to_metric_families

from aftserve.observability.metrics import Metrics, ModelMetrics
from aftserve.observability.tracing import exemplar_labels, request_id


def series(metrics: Metrics, model: str) -> dict[str, float]:
    """Return the series of a model by their names and other labels; those of times left out."""
    found = dict[str, float]()
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        for sample in family.samples:
            if sample.labels.get("model") == model and not sample.name.endswith("_created"):
                rest = {key: value for key, value in sample.labels.items() if key != "model"}
                found[f"{sample.name}{rest}"] = sample.value
    return found


def count(metrics: ModelMetrics) -> None:
    """Count something in metrics of each kind, with and without further labels."""
    metrics.observe_run([3, 5], 0.5)
    metrics.observe_prediction(1.0, 2.0)
    metrics.reloads.labels("served").inc()
    metrics.parity_checks.labels("batch", "within").inc()
    metrics.slowdown.set_function(lambda: 2.5)
    metrics.observe_bundle("sha256:1", 7.0)


def test_models_have_series_of_their_own() -> None:
    metrics = Metrics()
    count(metrics.of("a"))
    metrics.of("b").stopped_runs.inc()
    assert metrics.of("a") is metrics.of("a")
    first, second = series(metrics, "a"), series(metrics, "b")
    assert first["aftserve_run_tokens_total{'kind': 'padding'}"] == 2
    assert first["aftserve_pace{}"] == 2.5
    assert first["aftserve_stopped_runs_total{}"] == 0
    assert second["aftserve_stopped_runs_total{}"] == 1
    assert second["aftserve_run_documents_count{}"] == 0
    assert (metrics.of("a").inference.runs[2].count, metrics.of("b").inference.runs) == (1, {})


def test_forgotten_model_has_no_series() -> None:
    metrics = Metrics()
    for name in "ab":
        count(metrics.of(name))
        metrics.responses.labels("/infer", "200", name).inc()
    metrics.responses.labels("/metrics", "200", "").inc()
    kept, process = series(metrics, "b"), series(metrics, "")
    metrics.forget("a")
    assert series(metrics, "a") == {}
    assert (series(metrics, "b"), series(metrics, "")) == (kept, process)
    assert metrics.of("a").inference.runs == {}
    count(metrics.of("a"))
    assert series(metrics, "a")["aftserve_run_documents_count{}"] == 1


def test_late_counts_begin_no_series() -> None:
    metrics = Metrics()
    count(late := metrics.of("a"))
    metrics.forget("a")
    count(late)
    assert series(metrics, "a") == {}
    count(metrics.of("a"))
    count(late)
    assert series(metrics, "a")["aftserve_run_documents_count{}"] == 1


def test_forgotten_model_is_not_kept_in_memory() -> None:
    class Model:
        factor = 2.0

    metrics, model = Metrics(), Model()
    left = weakref.ref(model)
    metrics.of("a").slowdown.set_function(lambda model=model: model.factor)  # type: ignore[misc]
    metrics.forget("a")
    del model
    gc.collect()
    assert left() is None


def test_new_bundle_replaces_digest_of_its_model() -> None:
    metrics = Metrics()
    for name in "ab":
        metrics.of(name).observe_bundle("sha256:1", 7.0)
    metrics.of("a").observe_bundle("sha256:2", 8.0)
    info = "aftserve_bundle_info{'bundle': 'sha256:%d'}"
    assert series(metrics, "a").get(info % 1) is None
    assert series(metrics, "a")[info % 2] == series(metrics, "b")[info % 1] == 1


def test_exemplars_stand_beside_the_model() -> None:
    metrics = Metrics()
    request_id.set("request-1")
    metrics.of("a").stage_seconds.labels("tokenize").observe(0.2, exemplar_labels(None))
    text = metrics.exposition(openmetrics=True)[0].decode()
    (line,) = [line for line in text.splitlines() if "request-1" in line]
    assert 'model="a",stage="tokenize"' in line
