"""Families of transformers are exported as their record says, and equal the library."""

from pathlib import Path

import pytest
from sampling import any_case

from families.measure import measure
from families.record import read_rows
from families.table import BY_TITLE

RECORDED = {row["family"]: row for row in read_rows()}
MAX_ERROR = 1e-4
_LEFT_OUT = ("bf16", "int8")
"""Exports of their own, which take as long again."""


def test_record_is_of_table() -> None:
    """If it fails, run ``make models``."""
    assert list(RECORDED) == list(BY_TITLE)


@pytest.mark.slow
@pytest.mark.table(keep=0.06, by=any_case)
@pytest.mark.parametrize("title", RECORDED)
def test_family_is_as_recorded(title: str, tmp_path: Path) -> None:
    row, recorded = measure(BY_TITLE[title], tmp_path), RECORDED[title]
    for each in (row, recorded):
        assert all(each.pop(name, 0.0) < MAX_ERROR for name in ("error", "parity"))
    assert row == {name: value for name, value in recorded.items() if name not in _LEFT_OUT}
