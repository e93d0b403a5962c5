"""The statistics of a model, by Triton's extension of the protocol."""

from pydantic import BaseModel, Field

from aftserve.observability.inference_stats import InferenceStats, TotalTime


class StatisticDuration(BaseModel):
    """A number of events, and the sum of their times."""

    count: int
    ns: int = Field(description="Nanoseconds.")


class InferStatistics(BaseModel):
    """Requests and their stages; the caches of Triton do not exist, so their counts are 0."""

    success: StatisticDuration
    fail: StatisticDuration
    queue: StatisticDuration
    compute_input: StatisticDuration = Field(description="Tokenization.")
    compute_infer: StatisticDuration = Field(description="Runs of the engine.")
    compute_output: StatisticDuration = Field(description="Scores, spans and evidence.")
    cache_hit: StatisticDuration
    cache_miss: StatisticDuration


class BatchStatistics(BaseModel):
    """Runs of one number of documents; input and output are not part of a run, so they are 0."""

    batch_size: int
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration


class ModelStatistics(BaseModel):
    """The statistics of a model since the server started."""

    name: str
    version: str
    last_inference: int = Field(description="Unix time of the last request in milliseconds, or 0.")
    inference_count: int = Field(description="Number of answered documents.")
    execution_count: int = Field(description="Number of runs of the engine.")
    inference_stats: InferStatistics
    batch_stats: list[BatchStatistics]


class Statistics(BaseModel):
    """The statistics of models of the server."""

    model_stats: list[ModelStatistics]


_NONE = StatisticDuration(count=0, ns=0)


def statistics_of(stats: InferenceStats, name: str, version: str) -> ModelStatistics:
    """Return the statistics of a model in the form of the protocol.

    Args:
        stats: the counts and times.
        name, version: name and version of the model.
    """
    inference = InferStatistics(
        success=_duration(stats.answered),
        fail=_duration(stats.failed),
        queue=_duration(stats.queue),
        compute_input=_duration(stats.tokenize),
        compute_infer=_duration(stats.run),
        compute_output=_duration(stats.finish),
        cache_hit=_NONE,
        cache_miss=_NONE,
    )
    batches = [
        BatchStatistics(
            batch_size=size,
            compute_input=_NONE,
            compute_infer=_duration(total),
            compute_output=_NONE,
        )
        for size, total in sorted(stats.runs.items())
    ]
    return ModelStatistics(
        name=name,
        version=version,
        last_inference=int(stats.last_request * 1000),
        inference_count=stats.documents,
        execution_count=sum(total.count for total in stats.runs.values()),
        inference_stats=inference,
        batch_stats=batches,
    )


def _duration(total: TotalTime) -> StatisticDuration:
    return StatisticDuration(count=total.count, ns=round(total.seconds * 1e9))
