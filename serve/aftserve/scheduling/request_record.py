"""The record of an answered request in metrics and traces."""

from collections.abc import Sequence
from dataclasses import dataclass

from aftserve.model.inputs import TokenizedDocument
from aftserve.observability.exemplars import exemplar_labels
from aftserve.observability.model_metrics import ModelMetrics
from aftserve.observability.tracing import Traces
from aftserve.scheduling.job import Result
from aftserve.schemas import DocumentResult


@dataclass(frozen=True)
class RequestRecord:
    """The times of an answered request: points by ``time.monotonic``, and a prediction.

    Attributes:
        began: start of tokenization.
        admitted: end of tokenization, and start of the wait for the engine.
        predicted: predicted seconds from ``admitted`` to the answer.
        ended: end of the last stage.
    """

    began: float
    admitted: float
    predicted: float
    ended: float

    def count(
        self, metrics: ModelMetrics, results: Sequence[DocumentResult], trace_id: str | None
    ) -> None:
        """Count the request and its documents in the metrics, with an exemplar of the request."""
        exemplar = exemplar_labels(trace_id)
        metrics.observe_prediction(self.predicted, self.ended - self.admitted)
        timings = [result.timings for result in results]
        run_end = max(one.queue_seconds + one.inference_seconds for one in timings)
        queue = max(one.queue_seconds for one in timings)
        metrics.inference.add_answered(
            len(results),
            tokenize=self.admitted - self.began,
            queue=queue,
            run=run_end - queue,
            finish=max(0.0, self.ended - self.admitted - run_end),
        )
        for result in results:
            metrics.document_tokens.observe(result.tokens_total)
            metrics.truncated_documents.inc(result.truncated)
            for stage in ("tokenize", "queue", "inference"):
                seconds = getattr(result.timings, f"{stage}_seconds")
                metrics.stage_seconds.labels(stage).observe(seconds, exemplar)

    def trace(
        self, traces: Traces, inputs: Sequence[TokenizedDocument], done: Sequence[Result]
    ) -> None:
        """Record the stages of the request in its trace."""
        total = sum(len(one.ids) for one in inputs)
        traces.record("tokenize", self.began, self.admitted, documents=len(inputs), tokens=total)
        for one, result in zip(inputs, done, strict=True):
            traces.record("queue", self.admitted, result.started, tokens=len(one.used))
            traces.record(
                "infer",
                result.started,
                result.started + result.inference_seconds,
                tokens=len(one.used),
                batch_documents=result.batch_documents,
                predicted_seconds=self.predicted,
                actual_seconds=self.ended - self.admitted,
            )
