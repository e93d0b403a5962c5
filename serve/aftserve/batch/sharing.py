"""The choice of documents that share a run, when all of them are known."""

from collections.abc import Iterator, Sequence

from aftserve.model.costs import MIN_BATCH_GAIN, CostModel
from aftserve.scheduling.batching import MAX_LENGTH_RATIO


def shared_runs(
    lengths: Sequence[int], costs: CostModel, *, budget_tokens: int, masks_padding: bool
) -> Iterator[list[int]]:
    """Group documents of similar length, as long as a shared run costs less than single runs.

    Args:
        lengths: tokens of each document.
        costs: cost model of runs on this machine.
        budget_tokens: maximum tokens of a shared run, padding included.
        masks_padding: whether documents of several lengths may share a run.

    Yields:
        Indices of the documents of each run; each document is in exactly one.
    """
    run: list[int] = []
    seconds = 0.0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length, documents = lengths[index], len(run) + 1
        near = run and length <= (MAX_LENGTH_RATIO if masks_padding else 1) * lengths[run[0]]
        if near and documents * length <= budget_tokens:
            joined = costs.batch(documents, length)
            if joined < (1 - MIN_BATCH_GAIN) * (seconds + costs.single(length)):
                run.append(index)
                seconds = joined
                continue
        if run:
            yield run
        run, seconds = [index], costs.single(length)
    if run:
        yield run
