"""Documents that share a run: each is in one, near in length, and cheaper than alone."""

from hypothesis import given
from hypothesis import strategies as st

from aftserve.batch.sharing import shared_runs
from aftserve.model.costs import GAIN, Costs, Measurement
from aftserve.scheduling.batching import STRETCH

BUDGET = 2048
COSTS = Costs(
    [
        *(Measurement(1, tokens, 0.001 + tokens * 1e-5) for tokens in (1, 64, 1024, 16_384)),
        *(Measurement(n, t, 0.001 + n * t * 1e-5) for n in (2, 4, 8) for t in (1, 64, 256)),
    ]
)  # fmt: skip


@given(st.lists(st.integers(1, 3000), max_size=80), st.booleans())
def test_each_is_in_one_run_that_pays(lengths: list[int], pads: bool) -> None:
    runs = list(shared_runs(lengths, COSTS, budget_tokens=BUDGET, pads=pads))
    assert sorted(index for run in runs for index in run) == list(range(len(lengths)))
    for run in filter(lambda run: len(run) > 1, runs):
        longest, shortest = max(lengths[i] for i in run), min(lengths[i] for i in run)
        assert longest <= (STRETCH if pads else 1) * shortest
        assert len(run) * longest <= BUDGET
        alone = sum(COSTS.alone(lengths[i]) for i in run)
        assert COSTS.together(len(run), longest) < GAIN * alone


def test_what_is_cheaper_together_is_not_run_alone() -> None:
    assert list(shared_runs([5] * 20, COSTS, budget_tokens=BUDGET, pads=True)) == [
        list(range(8)), list(range(8, 16)), list(range(16, 20))
    ]  # fmt: skip
    assert list(shared_runs([9000, 5, 9000, 5], COSTS, budget_tokens=BUDGET, pads=True)) == [
        [1, 3], [0], [2]
    ]  # fmt: skip
