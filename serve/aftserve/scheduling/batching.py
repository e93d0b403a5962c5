"""The choice of queued documents that share the next run."""

import asyncio
import time
from collections.abc import Iterable

from aftserve.model.answers import Answer
from aftserve.model.costs import MIN_BATCH_GAIN, CostModel
from aftserve.scheduling.engine_state import Run
from aftserve.scheduling.job import Job

MAX_LENGTH_RATIO = 1.5
"""Maximum length of a batch's longest document over that of its shortest."""
_LOOK_AHEAD = 64


def next_batch(
    waiting: Iterable[Job],
    costs: CostModel,
    *,
    budget_tokens: int,
    masks_padding: bool,
    now: float,
) -> list[Job]:
    """Return the oldest job, with younger ones that cost less in its run than in single runs.

    A younger job may overtake others only while these stay in time. Once a skipped job would be
    answered later than promised, the batch is complete.

    Args:
        waiting: jobs, the oldest first; at least one.
        costs: cost model of the oldest job's model on this machine.
        budget_tokens: maximum tokens of a batch, padding included.
        masks_padding: whether jobs of several lengths may share a run.
        now: current time by ``time.monotonic``.
    """
    jobs = iter(waiting)
    batch = [next(jobs)]
    longest = shortest = batch[0].tokens
    if batch[0].single or batch[0].progress or longest > costs.batch_tokens:
        return batch
    seconds = batch[0].seconds
    for job, _ in zip(jobs, range(_LOOK_AHEAD), strict=False):
        documents = len(batch) + 1
        if documents > costs.batch_documents:
            break
        high, low = max(longest, job.tokens), min(shortest, job.tokens)
        is_near = high <= MAX_LENGTH_RATIO * low if masks_padding else high == low
        is_single = job.single or job.progress is not None or job.active is not batch[0].active
        if is_near and not is_single and documents * high <= budget_tokens:
            joined = costs.batch(documents, high)
            if joined < (1 - MIN_BATCH_GAIN) * (seconds + job.seconds):
                batch.append(job)
                longest, shortest, seconds = high, low, joined
                continue
        if now + seconds + job.seconds > job.promised:
            break
    return batch


def document_run(
    jobs: Iterable[Job], budget_tokens: int, ended: "asyncio.Future[list[Answer] | None]"
) -> Run:
    """Return the next run with the oldest job, and predict its time; see ``next_batch``."""
    model = next(iter(jobs)).active.model
    batch = next_batch(
        jobs,
        model.costs,
        budget_tokens=budget_tokens,
        masks_padding=model.classifier.masks_padding,
        now=time.monotonic(),
    )
    if (progress := batch[0].progress) is not None:
        calibrated = seconds = batch[0].seconds / progress.left
    else:
        calibrated = sum(model.costs.single(job.tokens) for job in batch)
        seconds = model.costs.batch(len(batch), max(job.tokens for job in batch))
    return Run(batch, model, calibrated, seconds * model.slowdown.value, ended)
