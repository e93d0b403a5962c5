"""Columns of heads for tokens have the server's answers."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory import NEEDS_PROC

from aftexport.errors import InputError
from aftserve.batch import output
from aftserve.batch.answering import OfflineClassifier
from aftserve.settings import Settings

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
