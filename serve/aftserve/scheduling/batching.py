"""Which of the waiting documents share the next run."""

from collections.abc import Iterable

from aftserve.model.costs import GAIN, Costs
from aftserve.scheduling.job import Job

STRETCH = 1.5
"""Its longest document is at most so many times as long as its shortest."""
_LOOK_AHEAD = 64


def next_batch(
    waiting: Iterable[Job], costs: Costs, *, budget_tokens: int, pads: bool, now: float
) -> list[Job]:
    """The oldest job, with younger ones of its model that are cheaper in its run than alone.

    A younger job may overtake others only while those are in time: once one that is passed
    over would be answered later than it was promised, nothing more is taken along.

    Args:
        waiting: jobs, the oldest first; at least one.
        costs: of the oldest one's model on this machine.
        budget_tokens: most tokens of a batch, padding included.
        pads: whether jobs of several lengths may share a run.
        now: by ``time.monotonic``.
    """
    jobs = iter(waiting)
    batch = [next(jobs)]
    longest = shortest = batch[0].tokens
    if batch[0].alone or batch[0].progress or longest > costs.batch_tokens:
        return batch
    together = batch[0].seconds
    for job, _ in zip(jobs, range(_LOOK_AHEAD), strict=False):
        documents = len(batch) + 1
        if documents > costs.batch_documents:
            break
        high, low = max(longest, job.tokens), min(shortest, job.tokens)
        near = high <= STRETCH * low if pads else high == low
        single = job.alone or job.progress is not None or job.served is not batch[0].served
        if near and not single and documents * high <= budget_tokens:
            more = costs.together(documents, high)
            if more < GAIN * (together + job.seconds):
                batch.append(job)
                longest, shortest, together = high, low, more
                continue
        if now + together + job.seconds > job.promised:
            break
    return batch
