"""Columns, rows and ids of the output of ``aftserve batch``."""

import json
import math
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from calibrations import calibration
from memory import NEEDS_PROC
from text_folders import unchecked_strings

from aftexport.errors import InputError
from aftexport.heads import (
    BinaryClassification,
    Head,
    MultiLabelClassification,
    Regression,
    SingleLabelClassification,
)
from aftexport.heads.calibration import Scaling
from aftexport.heads.regression import Value
from aftserve.batch import output
from aftserve.batch.answering import OfflineClassifier, Outcome
from aftserve.model.answers import Answer
from aftserve.settings import Settings

MARKS: Any = {"policy": "exact", "bundle": "digest"}
TWO_CLASSES = {"logits": SingleLabelClassification(labels=("yes", "no"))}
TEXT, NUMBER = pa.string(), pa.float64()
SAID: list[pa.Field] = [
    pa.field("tokens_total", pa.int64()),
    pa.field("tokens_used", pa.int64()),
    pa.field("truncated", pa.bool_()),
    pa.field("policy", TEXT),
    pa.field("bundle", TEXT),
    pa.field("error", TEXT),
]
"""The columns after the answer, the same for every head."""


def numbers(*names: str) -> pa.StructType:
    return pa.struct([pa.field(name, NUMBER) for name in names])


EACH_HEAD: dict[str, tuple[Head, list[float], dict[str, pa.DataType], dict[str, Any]]] = {
    "single_label_classification": (
        SingleLabelClassification(labels=("yes", "no")),
        [0.0, 0.0],
        {"label": TEXT, "scores": numbers("yes", "no")},
        {"label": "yes", "scores": {"yes": 0.5, "no": 0.5}},
    ),
    "binary_classification": (
        BinaryClassification(labels=("ham", "spam"), threshold=0.5),
        [0.0],
        {"label": TEXT, "scores": numbers("ham", "spam")},
        {"label": "spam", "scores": {"ham": 0.5, "spam": 0.5}},
    ),
    "multi_label_classification": (
        MultiLabelClassification(labels=("urgent", "legal", "spam"), thresholds=(0.4, 0.6, 0.5)),
        [0.0, 0.0, 0.0],
        {
            "heads": pa.struct(
                {
                    "logits": pa.struct(
                        {"labels": pa.list_(TEXT), "scores": numbers("urgent", "legal", "spam")}
                    )
                }
            )
        },
        {
            "heads": {
                "logits": {
                    "labels": ["urgent", "spam"],
                    "scores": {"urgent": 0.5, "legal": 0.5, "spam": 0.5},
                }
            }
        },
    ),
    "regression": (
        Regression(values=(Value(name="age", scale=12.5, offset=40.0), Value(name="mass"))),
        [-2.0, 7.25],
        {"heads": pa.struct({"logits": pa.struct({"values": numbers("age", "mass")})})},
        {"heads": {"logits": {"values": {"age": 15.0, "mass": 7.25}}}},
    ),
}
"""A head for each task, with logits, the columns of its answer, and a row of them."""


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("task", EACH_HEAD)
def test_columns_fit_head(task: str, suffix: str, tmp_path: Path) -> None:
    head, logits, types, answered = EACH_HEAD[task]
    assert head.task == task
    columns = output.schema({"logits": head}, pa.string())
    assert list(columns) == [
        pa.field("id", TEXT), *(pa.field(name, kind) for name, kind in types.items()), *SAID
    ]  # fmt: skip
    row = np.array(logits)
    answer = Answer({"logits": head.answer(row)}, row)
    outcomes = [
        Outcome(answer, None, 9, 7),
        Outcome(None, InputError("It has no tokens.", "Send some."), 3, 0),
    ]
    ids = pa.chunked_array([pa.array(["a.txt", "b.txt"])])
    path = tmp_path / f"out{suffix}"
    with output.Writer(path, path, columns, numbered=False) as writer:
        writer.write(output.table(ids, outcomes, columns, **MARKS))
    if suffix == ".parquet":
        found = pq.read_table(path)
        assert found.schema == columns
        rows = found.to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert [list(row) for row in rows] == [columns.names] * 2
    assert rows == [
        {"id": "a.txt", **answered, "tokens_total": 9, "tokens_used": 7, "truncated": True, **MARKS,
         "error": None},
        {"id": "b.txt", **dict.fromkeys(types), "tokens_total": 3, "tokens_used": 0,
         "truncated": None, **MARKS, "error": "It has no tokens. Send some."},
    ]  # fmt: skip


def test_calibrated_columns_follow_scores() -> None:
    found = {"logits": calibration(Scaling(log_temperature=0.5), above=0.9)}
    columns = output.schema(TWO_CLASSES, None, found)
    assert columns.names[:5] == ["id", "label", "scores", "calibrated", "abstain"]
    outcomes = [Outcome(error=InputError("No answer.", "Stop."))]
    (row,) = output.table(None, outcomes, columns, **MARKS).to_pylist()
    assert (row["calibrated"], row["abstain"]) == (None, None)


def test_rows_without_ids_are_numbered(tmp_path: Path) -> None:
    columns = output.schema(TWO_CLASSES, None)
    with output.Writer(tmp_path / "out", Path("out.jsonl"), columns, numbered=True) as writer:
        for count in (2, 3):
            writer.write(
                output.table(
                    None,
                    [Outcome(error=InputError("No answer.", "Stop."))] * count,
                    columns,
                    **MARKS,
                )
            )
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
    columns = output.schema(TWO_CLASSES, ids.type)
    outcomes = [Outcome(error=InputError("No answer.", "Stop."))] * len(ids)
    rows = output.table(pa.chunked_array([ids]), outcomes, columns, **MARKS)
    path = tmp_path / "out.jsonl"
    with output.Writer(path, path, columns, numbered=False) as writer:
        writer.write(rows)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line, parse_constant=refuse)["id"] for line in lines] == shown


TEXTS = ["Zoë paid 😀 in May.", "a", "the contract ends " * 30]


@pytest.fixture(scope="module")
def offline(heads_bundle: Path) -> OfflineClassifier:
    return OfflineClassifier(Settings.read([str(heads_bundle)]))


def test_rows_are_answers(offline: OfflineClassifier, tmp_path: Path) -> None:
    heads = offline._model.classifier.manifest.heads
    unreadable = InputError("The file is not UTF-8 at byte 3.", "Convert it.")
    outcomes = list(offline.answer([*TEXTS[:2], unreadable, TEXTS[2]]))
    columns = output.schema(heads, None)
    rows = output.table(None, outcomes, columns, policy="exact", bundle="digest")
    kinds = {field.name: field.type for field in columns.field("heads").type}
    assert pa.types.is_list(kinds["embedding"].field("vector").type)
    assert kinds["vectors"].field("vectors").type.value_type.list_size == 4
    with output.Writer(tmp_path / "a", tmp_path / "a.parquet", columns, numbered=True) as writer:
        writer.write(rows)
    with output.Writer(tmp_path / "b", tmp_path / "b.jsonl", columns, numbered=True) as writer:
        writer.write(rows)
    stored = pq.read_table(tmp_path / "a").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "b").read_text("utf-8").splitlines()]
    assert [row["heads"] for row in stored] == [line["heads"] for line in lines]
    assert stored[2]["heads"] is None
    assert stored[2]["error"] is not None


@NEEDS_PROC
def test_answers_open_no_files(
    offline: OfflineClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of many documents would reach the limit of open files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (outcome,) = offline.answer(["a long document " * 6000])
    assert outcome.tokens is not None
    assert outcome.tokens.results["vectors"].vectors.nbytes > 1 << 20
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_rows_without_answers_have_columns(offline: OfflineClassifier) -> None:
    heads = offline._model.classifier.manifest.heads
    outcomes = list(offline.answer([InputError("Unreadable.", "Convert it.")] * 2))
    columns = output.schema(heads, None)
    rows = output.table(None, outcomes, columns, policy="exact", bundle="digest")
    assert rows["heads"].null_count == 2
    assert rows.schema == columns
