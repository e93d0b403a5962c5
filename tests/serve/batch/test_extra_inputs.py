"""Columns of extra inputs in a batch run."""

from pathlib import Path
from typing import Any

import input_models
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_models
import torch
from commands import run_python
from text_folders import unchecked_strings

from aftexport.bundle.bundle import Bundle
from aftexport.errors import UsageError
from aftexport.extra_inputs import sample_values
from aftserve.batch import documents
from aftserve.batch.answering import OfflineClassifier
from aftserve.settings import Settings

TEXTS = ["An invoice.", "a", "Pay this by Friday, or the contract ends. " * 9, "No region."]


@pytest.fixture(scope="module")
def rows(extra_bundle: Path) -> list[dict[str, Any]]:
    """A row for each text; the last lacks its region."""
    extras = Bundle.open(extra_bundle).manifest.extra_inputs
    generator = np.random.default_rng(0)
    found = [
        {"text": text, **sample_values(extras, generator, len(text)).to_json()} for text in TEXTS
    ]
    found[-1]["region"] = None
    return found


def expected(row: dict[str, Any]) -> list[float]:
    """Compute the scores by PyTorch in float64."""
    model = input_models.Events().double().eval()
    given = {name: torch.tensor([row[name]]) for name in input_models.INPUTS}
    given["static"] = given["static"].double()
    ids = torch.tensor([list(row["text"].encode())])
    with torch.inference_mode():
        logits = model(ids, lengths=torch.tensor([ids.shape[1]]), **given)[0]
    return list(logits.softmax(0).tolist())


def test_rows_reach_the_model(extra_bundle: Path, rows: list[dict[str, Any]]) -> None:
    offline = OfflineClassifier(Settings.read([str(extra_bundle)]))
    fields = [{name: row[name] for name in input_models.INPUTS} for row in rows]
    *outcomes, failed = offline.answer([row["text"] for row in rows], fields)
    for outcome, row in zip(outcomes, rows, strict=False):
        assert outcome.answer is not None, outcome.error
        scores = list(outcome.answer.heads["logits"].scores.values())
        np.testing.assert_allclose(scores, expected(row), atol=1e-5)
    assert failed.answer is None
    assert "Expected the input 'region', one number, got none" in str(failed.error)


def test_batch_reads_columns(
    ray: dict[str, str], extra_bundle: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    words = ["batch", extra_bundle, "in.parquet", "--output", "out.parquet"]
    outcome = run_python("-m", "aftserve", *words, cwd=tmp_path, **ray)
    assert outcome.code == 3, outcome.err
    *answers, failed = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for answer, row in zip(answers, rows, strict=False):
        scores = [answer["scores"][label] for label in tiny_models.LABELS]
        np.testing.assert_allclose(scores, expected(row), atol=1e-5)
    assert "'region'" in failed["error"]


def test_missing_columns_are_refused(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    table = pa.Table.from_pylist(rows)
    pq.write_table(table.drop_columns("static"), tmp_path / "in.parquet")
    found = documents.find(tmp_path / "in.parquet", text="text", id=None)
    with pytest.raises(UsageError, match=r"one column 'static'.*Write a column for each extra"):
        found.with_inputs(list(input_models.INPUTS))
    pq.write_table(table, tmp_path / "in.parquet")
    found = documents.find(tmp_path / "in.parquet", text="text", id="region")
    with pytest.raises(UsageError, match="'region' is an input of the model"):
        found.with_inputs(list(input_models.INPUTS))


def test_lists_are_read_as_arrays() -> None:
    """Lists of Python for all rows of a block would take a hundred bytes for each token."""
    table = pa.table(
        {
            "text": ["a"] * 4,
            "input:types": pa.array([[1, 2], None, [3, None], []]),
            "input:static": pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)),
            "input:region": pa.array([1, 2, None, 1]).dictionary_encode(),
            "input:bad": unchecked_strings(b"\xff", b"a", b"a", b"a"),
        }
    )
    rows = documents.fields_of(table)
    assert iter(rows) is rows
    first, second, third, last = rows
    assert isinstance(first["types"], np.ndarray)
    assert first["types"].tolist() == [1, 2]
    assert first["static"].dtype == np.float32
    assert (first["region"], second["types"], third["region"]) == (1, None, None)
    assert np.isnan(third["types"][1])
    assert last["types"].shape == (0,)
    assert not isinstance(first["bad"], str)
    assert [*documents.fields_of(table.select(["text"]))] == [{}] * 4


def test_files_have_no_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc", "utf-8")
    found = documents.find(tmp_path, text=None, id=None)
    assert found.with_inputs([]) == found
    with pytest.raises(
        UsageError, match="Expected a column for each input of the model, static, got files"
    ):
        found.with_inputs(["static"])
