import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from aftexport.demo.series import (
    BURST,
    MACHINES,
    NAMES,
    STEPS,
    Series,
    features_of,
    find_fault,
    make_series,
    normalized,
    summaries,
)
from aftexport.demo.series_run import answer_rows

SERIES = make_series(80, seed=1)


def test_series_follow_their_seed() -> None:
    again, other = make_series(80, seed=1), make_series(80, seed=2)
    for one, same in zip(SERIES, again, strict=True):
        np.testing.assert_array_equal(one.ids, same.ids)
    assert [len(one) for one in SERIES] != [len(one) for one in other]
    assert all(len(one) in STEPS and one.ids.shape[1] == len(NAMES) for one in SERIES)
    assert {one.label: 0 for one in SERIES}.keys() == {*MACHINES}
    lengths = [len(one) for one in SERIES]
    assert min(lengths) < 400
    assert max(lengths) > 10_000


def test_units_are_shared_by_all_series() -> None:
    """Training and held-out series have the same sensors."""
    other = features_of(make_series(80, seed=2))
    mine = features_of(SERIES)
    assert mine.names == NAMES
    np.testing.assert_allclose(mine.mean or (), other.mean or (), atol=2)
    np.testing.assert_allclose(mine.scale or (), other.scale or (), rtol=0.05)
    values = np.concatenate([one.ids for one in normalized(SERIES, mine)])
    np.testing.assert_allclose(values.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(values.std(0), 1, atol=1e-3)


def test_matched_filter_finds_machine() -> None:
    right = [find_fault(one.ids) == one.label for one in SERIES]
    assert np.mean(right) > 0.95


def test_means_and_deviations_tell_nothing() -> None:
    baseline = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    train, test = make_series(200, seed=5), make_series(200, seed=6)
    baseline.fit(summaries(train), [one.label for one in train])
    right = baseline.predict(summaries(test)) == [one.label for one in test]
    assert right.mean() == pytest.approx(1 / len(MACHINES), abs=0.12)


def test_every_part_has_the_machine() -> None:
    assert SERIES[2].part(0, BURST).item() == MACHINES.index(SERIES[2].label)


def test_answer_is_compared_with_truth() -> None:
    answer = {
        "label": "fan",
        "scores": {"pump": 0.25, "fan": 0.75},
        "evidence": {"spans": [{"contribution": 1.5, "start_token": 1000, "end_token": 1032}]},
        "tokens_used": 2000,
        "tokens_total": 2000,
        "timings": {"inference_seconds": 0.5},
    }
    rows = answer_rows(answer, Series(np.zeros((2000, 16), np.float32), "pump"))
    assert [text for _, text in rows] == [
        "[bold]fan[/] ([red]wrong[/], it is pump)",
        "fan 0.750, pump 0.250",
        "+1.50 steps 1,000 to 1,031",
        "2,000 used of 2,000",
        "500.0 ms",
    ]
    (label, *_) = answer_rows(answer, Series(np.zeros((2000, 16), np.float32), "fan"))
    assert "right" in label[1]
