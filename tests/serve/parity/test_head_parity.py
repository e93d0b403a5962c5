"""Flips of spans, and breaches of parity in the answers for tokens."""

from pathlib import Path

import numpy as np
import pytest
import served_heads
from clients import eventually, http, metric
from servers import serving

from aftexport.heads import TokenClassification
from aftserve.model.answers import NO_MARKS, Decoding
from aftserve.parity.monitor import count_span_flips

HEAD = TokenClassification(labels=("O", "B-name", "I-name"))
HEADS = {"tags": HEAD, "plain": TokenClassification(labels=("O", "a"), aggregation="none")}


def rows_of(*places: int) -> np.ndarray:
    return np.eye(3)[list(places)] * 9


@pytest.mark.parametrize(
    ("output", "expected", "flips"),
    [
        ((0, 1, 2, 0), (0, 1, 2, 0), 0),
        ((0, 1, 0, 0), (0, 1, 2, 0), 2),  # one span is shorter: neither has that of the other
        ((0, 0, 0, 0), (0, 1, 2, 0), 1),
        ((0, 1, 1, 0), (0, 1, 2, 0), 3),
    ],
)
def test_span_flips_count_differences(
    output: tuple[int, ...], expected: tuple[int, ...], flips: int
) -> None:
    outputs = {"tags": rows_of(*output), "plain": np.zeros((4, 2))}
    wanted = {"tags": rows_of(*expected), "plain": np.ones((4, 2))}
    assert count_span_flips(HEADS, outputs, wanted, NO_MARKS) == {"tags": flips}


def test_span_flips_leave_added_tokens_out() -> None:
    outputs, wanted = {"tags": rows_of(1, 0)}, {"tags": rows_of(0, 0)}
    heads = {"tags": HEAD}
    decoding = Decoding(is_special=np.array([True, False]))
    assert count_span_flips(heads, outputs, wanted, decoding) == {"tags": 0}
    assert count_span_flips(heads, outputs, wanted, NO_MARKS) == {"tags": 1}


@pytest.mark.slow
def test_shadow_compares_rows_of_tokens(
    heads_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared runs are compared with single ones, and both with PyTorch, for every output."""
    source = str(heads_bundle.with_name("model.pt"))
    monkeypatch.setenv("PYTHONPATH", str(Path(served_heads.__file__).parent))
    options = ("--reference", source, "--shadow", "1", "--threads", "1")
    factory = ("--reference-factory", "served_heads:EveryHead")
    with serving(heads_bundle, tmp_path / "log", *options, *factory) as (address, _):
        ids = [[7] * 30_000, *[[5, 9, 11] * 40] * 3]
        assert (
            http.post(f"{address}/infer", json={"input_ids": ids}, timeout=120).status_code == 200
        )
        within = {"kind": "reference", "verdict": "within"}
        eventually(
            lambda: metric(address, "aftserve_parity_checks_total", **within) == len(ids),
            "every document is compared",
        )
        for kind in ("reference", "batch"):
            outside = {"kind": kind, "verdict": "outside"}
            assert metric(address, "aftserve_parity_checks_total", **outside) == 0
        assert http.get(f"{address}/readyz").status_code == 200
