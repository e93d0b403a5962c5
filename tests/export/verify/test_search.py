from pathlib import Path

import numpy as np
import pytest
from commands import Capture, run_here

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.manifest import Manifest
from aftexport.engines import Stop, Tensors
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.verify.search import Search, token_norms


class Answering:
    """An engine whose answer is a function of the input."""

    name = "answering"

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.seen: list[dict[str, np.ndarray]] = []

    def run(self, inputs: Tensors, stop: Stop | None = None) -> dict[str, np.ndarray]:
        self.seen.append({name: np.asarray(array) for name, array in inputs.items()})
        return {"logits": np.array([[self.answer(row) for row in inputs["input_ids"]]]).T}  # type: ignore[operator]

    def release(self) -> None:
        """Keep nothing."""


@pytest.fixture
def manifest(bundle_folder: Path) -> Manifest:
    return Bundle.open(bundle_folder).manifest


def longest_run(ids: np.ndarray) -> float:
    """Return the length of the longest run of token 7, in thousandths."""
    best = count = 0
    for token in ids:
        count = count + 1 if token == 7 else 0
        best = max(best, count)
    return best / 1000


def test_search_finds_wrong_engine(manifest: Manifest) -> None:
    engine, reference = Answering(longest_run), Answering(lambda _: 0.0)
    norms = np.ones(manifest.vocab_size)
    norms[7] = 3.0
    case = Search(manifest, engine, reference, norms).run(60)
    assert longest_run(case.inputs["input_ids"].max(0)) > 0.1
    assert len(engine.seen) == 60


def test_search_tries_unusual_ids_first(manifest: Manifest) -> None:
    engine = Answering(lambda _: 0.0)
    Search(manifest, engine, Answering(lambda _: 0.0), None, unusual=[11, 5]).run(3)
    assert [set(inputs["input_ids"].ravel()) for inputs in engine.seen[:2]] == [{11}, {5}]


def test_search_tries_only_valid_inputs(manifest: Manifest) -> None:
    limited = manifest.model_copy(update={"max_tokens": 70})
    engine = Answering(lambda row: float(row.sum()) / 1e4)
    Search(limited, engine, Answering(lambda _: 0.0), None).run(80)
    shapes = set()
    for inputs in engine.seen:
        ids, lengths = inputs["input_ids"], inputs["lengths"]
        assert ids.dtype == lengths.dtype == np.int64
        assert 0 <= ids.min() <= ids.max() < manifest.vocab_size
        assert 1 <= lengths.min() <= lengths.max() == ids.shape[1] <= 70
        shapes.add(ids.shape)
    assert len(shapes) > 5
    assert {batch for batch, _ in shapes} == {1, 2, 3}


def test_model_without_lengths_gets_no_padding(manifest: Manifest) -> None:
    plain = manifest.model_copy(update={"inputs": ("input_ids",)})
    engine = Answering(lambda row: float(row.sum()) / 1e4)
    Search(plain, engine, Answering(lambda _: 0.0), None).run(20)
    assert all(inputs.keys() == {"input_ids"} for inputs in engine.seen)
    assert all(len(inputs["input_ids"]) == 1 for inputs in engine.seen)


def test_search_is_reproducible(manifest: Manifest) -> None:
    def found() -> list[list[int]]:
        engine = Answering(lambda row: float(row[0]) / 1e4)
        case = Search(manifest, engine, Answering(lambda _: 0.0), None).run(10)
        return case.inputs["input_ids"].tolist()

    assert found() == found()


def test_norms_match_embedding(bundle_folder: Path, classifier: object) -> None:
    norms = token_norms(Bundle.open(bundle_folder).model_path)
    table = classifier.embedding.weight  # type: ignore[attr-defined]
    np.testing.assert_allclose(norms, table.norm(dim=1).detach().numpy(), rtol=1e-6)


def test_search_compares_engine_with_pytorch(bundle_folder: Path, checkpoint_file: Path) -> None:
    from aftexport.verify.reference_model import load_source, torch_engine

    bundle = Bundle.open(bundle_folder)
    engine = OnnxRuntimeEngine(bundle.model_path)
    reference = torch_engine(bundle, load_source(bundle, checkpoint_file), double=True)
    search = Search(bundle.manifest, engine, reference, token_norms(bundle.model_path))
    case = search.run(8)
    output = engine.run(case.inputs)["logits"]
    assert case.outputs["logits"].shape == output.shape
    assert np.abs(output - case.outputs["logits"]).max() < 1e-4
    assert np.abs(output - case.outputs["logits"]).max() > 0


def test_search_shows_findings(
    bundle_folder: Path, checkpoint_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ["verify", bundle_folder, "--model", checkpoint_file, "--search", "5"]
    outcome = run_here([*words, "--report", tmp_path / "p.html"], capsys)
    assert outcome.code == 0, outcome.err
    assert "found by the search" in outcome.out
    assert "worst of 5 inputs" in outcome.out
    assert "worst of 5 inputs" in (tmp_path / "p.html").read_text("utf-8")
