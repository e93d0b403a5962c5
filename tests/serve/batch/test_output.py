"""Rows and ids of the output of ``aftserve batch``."""

import json
import math
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_arrays import unchecked_strings

from aftserve.batch import output
from aftserve.batch.answering import Outcome


def test_rows_without_ids_are_numbered(tmp_path: Path) -> None:
    columns = output.schema(["yes", "no"], None)
    marks: Any = {"policy": "exact", "bundle": "digest"}
    with output.Writer(tmp_path / "out", Path("out.jsonl"), columns, numbered=True) as writer:
        for count in (2, 3):
            writer.write(output.table(None, [Outcome(error="no answer")] * count, columns, **marks))
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        (pa.array([1.5, math.nan, -math.inf, None]), [1.5, None, None, None]),
        (pa.array([[1.0, math.nan], None]), [[1.0, None], None]),
        (pa.array([{"of": math.inf}]), [{"of": None}]),
        (pa.array([3, None]), [3, None]),
        (pa.array([True]), [True]),
        (unchecked_strings("ä".encode(), b"\xff"), ["ä", r"\xff"]),
        (pa.array([b"a", b"\xff"]), ["a", r"\xff"]),
        (pa.array(["a", "b", "a", None]).dictionary_encode(), ["a", "b", "a", None]),
        (pa.array([1], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000001"]),
        (pa.array([253402300800], pa.timestamp("s")), ["10000-01-01 00:00:00"]),
        (pa.array([date(2024, 2, 29)]), ["2024-02-29"]),
        (pa.array([Decimal("1.10")]), ["1.10"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_ids_of_any_type_become_json(ids: pa.Array, shown: list[Any], tmp_path: Path) -> None:
    columns = output.schema(["yes", "no"], ids.type)
    marks: Any = {"policy": "exact", "bundle": "digest"}
    outcomes = [Outcome(error="no answer")] * len(ids)
    rows = output.table(pa.chunked_array([ids]), outcomes, columns, **marks)
    path = tmp_path / "out.jsonl"
    with output.Writer(path, path, columns, numbered=False) as writer:
        writer.write(rows)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line, parse_constant=refuse)["id"] for line in lines] == shown
