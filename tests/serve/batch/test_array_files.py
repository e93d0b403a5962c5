"""Files of numpy.save as documents of a batch."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from input_models import FEATURES, MEAN, SCALE, Sensors

from aftserve.batch.answering import OfflineClassifier, Outcome
from aftserve.batch.documents import PATH, texts_of
from aftserve.settings import Settings


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
