"""Documents that are read from text files, .npy files and Parquet, and their extra inputs."""

import os
from pathlib import Path
from typing import Any

import input_models
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import run_python
from input_models import FEATURES, MEAN, SCALE, Sensors
from text_folders import unchecked_strings

from aftexport.bundle.bundle import Bundle
from aftexport.errors import UsageError
from aftexport.extra_inputs import sample_values
from aftserve.batch import documents
from aftserve.batch.answering import OfflineClassifier, Outcome
from aftserve.batch.documents import PATH, find, texts_of
from aftserve.errors import DocumentTooLongError
from aftserve.predictor import Predictor
from aftserve.settings import Settings


@pytest.mark.parametrize("option", ["text", "id"])
def test_column_of_text_files_is_refused(option: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    columns: dict[str, str | None] = {"text": None, "id": None}
    assert find(tmp_path, **columns).count == 1
    with pytest.raises(UsageError, match=f"--{option} names a column of Parquet"):
        find(tmp_path, **columns | {option: "text"})


def test_oversized_text_file_is_refused(tmp_path: Path) -> None:
    files = {"long": "\N{GRINNING FACE}" * 10, "too long": "a" * 41}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    block = pa.table({"path": [os.fsencode(tmp_path / name) for name in files]})
    long, too_long = texts_of(block, 10)
    assert long == files["long"]
    assert isinstance(too_long, DocumentTooLongError)


def test_invalid_utf8_fails_one_document() -> None:
    block = pa.table({"text": unchecked_strings(b"a", b"a\xff", b"b")})
    one, broken, other = texts_of(block, 100)
    assert (one, other) == ("a", "b")
    assert "not UTF-8 at byte 1" in str(broken)


def test_other_file_gets_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3")
    (found,) = texts_of(pa.table({"path": [os.fsencode(tmp_path / "a.pdf")]}), 100)
    assert "Extract the text of the PDF document first" in str(found)


def answers(bundle: Path, folder: Path) -> dict[str, Outcome]:
    """Return the outcome of each file of a folder, by its name."""
    settings = Settings.read([str(bundle), "--memory-budget-mib", "1"])
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    block = pa.table({PATH: [os.fsencode(path) for path in paths]})
    outcomes = OfflineClassifier(settings).answer(texts_of(block, settings.max_characters))
    return {path.name: outcome for path, outcome in zip(paths, outcomes, strict=True)}


def test_arrays_have_answers_of_pytorch(feature_bundle: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    documents = {}
    for tokens in (3, 40, 70_000):
        values = generator.standard_normal((tokens, FEATURES))
        documents[f"{tokens}.npy"] = (values * SCALE + MEAN).astype(np.float32)
    for name, document in documents.items():
        np.save(tmp_path / name, document)
    np.save(tmp_path / "bad.npy", np.full((2, FEATURES), np.nan, np.float32))
    np.save(tmp_path / "wide.npy", np.zeros((2, 9)))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "40.npy").read_bytes()[:-4])
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "other.npy").write_bytes(b"a,b\n")
    (tmp_path / "text.txt").write_text("no features", "utf-8")
    found = answers(feature_bundle, tmp_path)
    for name, document in documents.items():
        normalized = (document - np.float32(MEAN)) / np.float32(SCALE)
        with torch.inference_mode():
            wide = torch.from_numpy(normalized).double()[None]
            logits = Sensors().double().eval()(wide, torch.tensor([len(document)]))
        answer = found[name].answer
        assert answer is not None, found[name].error
        np.testing.assert_allclose(answer.outputs["logits"], logits[0].numpy(), atol=1e-4)
        assert found[name].tokens_total == len(document)
    said = {name: str(outcome.error) for name, outcome in found.items() if not outcome.answer}
    assert "got nan for the feature" in said.pop("bad.npy")
    assert "[tokens, 4], got float64 [2, 9]" in said.pop("wide.npy")
    assert "bytes by its header" in said.pop("cut.npy")
    assert "incomplete header" in said.pop("short.npy")
    assert "other bytes" in said.pop("other.npy")
    assert "Send input_features instead of text" in said.pop("text.txt")
    assert not said


def test_absent_array_fails_alone(feature_bundle: Path, tmp_path: Path) -> None:
    settings = Settings.read([str(feature_bundle)])
    (outcome,) = OfflineClassifier(settings).answer([tmp_path / "absent.npy"])
    assert "cannot be read" in str(outcome.error)


@pytest.mark.parametrize("kind", ["<i8", "<i4"])
def test_ids_are_documents_of_other_models(bundle_folder: Path, kind: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(20).astype(np.dtype(kind)))
    np.save(tmp_path / "outside.npy", np.full(3, 300))
    found = answers(bundle_folder, tmp_path)
    assert found["ids.npy"].answer is not None
    assert found["ids.npy"].tokens_total == 20
    assert "outside the vocabulary" in str(found["outside.npy"].error)


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


def test_batch_reads_columns(
    ray: dict[str, str], extra_bundle: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    words = ["batch", extra_bundle, "in.parquet", "--output", "out.parquet"]
    outcome = run_python("-m", "aftserve", *words, cwd=tmp_path, **ray)
    assert outcome.code == 3, outcome.err
    *answers, failed = pq.read_table(tmp_path / "out.parquet").to_pylist()
    with Predictor(extra_bundle, threads=1) as predictor:
        for answer, row in zip(answers, rows, strict=False):
            text, inputs = row["text"], {name: row[name] for name in input_models.INPUTS}
            scores = predictor(text, inputs=inputs).scores
            assert answer["scores"] == pytest.approx(scores, abs=1e-5)
    assert "Expected the input 'region', one number, got none" in failed["error"]


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
