"""Which of many documents share a run, where none of them waits."""

from collections.abc import Iterator, Sequence

from aftserve.model.costs import MIN_BATCH_GAIN, CostModel
from aftserve.scheduling.batching import MAX_LENGTH_RATIO


def shared_runs(
    lengths: Sequence[int], costs: CostModel, *, budget_tokens: int, masks_padding: bool
) -> Iterator[list[int]]:
    """Groups documents of similar length, as far as that is cheaper than one by one.

    Args:
        lengths: tokens of each document.
        costs: of runs on this machine.
        budget_tokens: most tokens of a run of several, padding included.
        masks_padding: whether documents of several lengths may share a run.

    Yields:
        Indices of the documents of a run; each document is in one.
    """
    run: list[int] = []
    seconds = 0.0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length, documents = lengths[index], len(run) + 1
        near = run and length <= (MAX_LENGTH_RATIO if masks_padding else 1) * lengths[run[0]]
        if near and documents * length <= budget_tokens:
            together = costs.batch(documents, length)
            if together < (1 - MIN_BATCH_GAIN) * (seconds + costs.single(length)):
                run.append(index)
                seconds = together
                continue
        if run:
            yield run
        run, seconds = [index], costs.single(length)
    if run:
        yield run
