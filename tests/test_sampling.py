"""The part of a table of cases that `make test` runs."""

from itertools import product

import pytest
import sampling

TABLE = list(product(range(20), ("float32", "float16"), (False, True)))


def describe(case: tuple[int, str, bool]) -> tuple[str, set[object]]:
    return str(case), set(enumerate(case))


def test_part_keeps_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "RUN_ALL", False)
    part = sampling.part_of(TABLE, describe)
    assert len(part) == len(set(part)) == 20
    assert {value for case in part for value in enumerate(case)} == {
        value for case in TABLE for value in enumerate(case)
    }


def test_part_does_not_depend_on_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "RUN_ALL", False)
    part = sampling.part_of(TABLE, describe, keep=0.4)
    assert len(part) == 32
    assert sampling.part_of(TABLE[::-1], describe, keep=0.4) == part


def test_whole_table_runs_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "RUN_ALL", True)
    assert sampling.part_of(TABLE, describe) == TABLE
    assert sampling.fewer(30) == 30
