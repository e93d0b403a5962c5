"""Runs that documents of similar length share."""

from hypothesis import given
from hypothesis import strategies as st

from aftserve.batch.answering import shared_runs
from aftserve.model.costs import MIN_BATCH_GAIN, CostModel, Measurement
from aftserve.scheduling.batching import MAX_LENGTH_RATIO

BUDGET = 2048
COSTS = CostModel(
    [
        *(Measurement(1, tokens, 0.001 + tokens * 1e-5) for tokens in (1, 64, 1024, 16_384)),
        *(Measurement(n, t, 0.001 + n * t * 1e-5) for n in (2, 4, 8) for t in (1, 64, 256)),
    ]
)  # fmt: skip


@given(st.lists(st.integers(1, 3000), max_size=80), st.booleans())
def test_every_document_is_in_one_run(lengths: list[int], masks_padding: bool) -> None:
    """Shared runs keep the limits on lengths and tokens, and cost less than single runs."""
    runs = list(shared_runs(lengths, COSTS, budget_tokens=BUDGET, masks_padding=masks_padding))
    assert sorted(index for run in runs for index in run) == list(range(len(lengths)))
    for run in filter(lambda run: len(run) > 1, runs):
        longest, shortest = max(lengths[i] for i in run), min(lengths[i] for i in run)
        assert longest <= (MAX_LENGTH_RATIO if masks_padding else 1) * shortest
        assert len(run) * longest <= BUDGET
        single = sum(COSTS.single(lengths[i]) for i in run)
        assert COSTS.batch(len(run), longest) < (1 - MIN_BATCH_GAIN) * single


def test_cheaper_documents_share_runs() -> None:
    assert list(shared_runs([5] * 20, COSTS, budget_tokens=BUDGET, masks_padding=True)) == [
        list(range(8)), list(range(8, 16)), list(range(16, 20))
    ]  # fmt: skip
    runs = shared_runs([9000, 5, 9000, 5], COSTS, budget_tokens=BUDGET, masks_padding=True)
    assert list(runs) == [[1, 3], [0], [2]]
