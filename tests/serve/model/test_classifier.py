"""The memory budget of a model that cannot run in chunks."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import onnx_texts
import pytest
from altered_bundles import softmax_bundle
from clients import http
from grpc_servers import GrpcServer, ids_request, serving_grpc
from onnx_texts import LABELS, VOCABULARY
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import InputError, UsageError
from aftexport.pipeline.export import export
from aftserve import Predictor
from aftserve.batch.answering import shared_runs
from aftserve.errors import DocumentTooLongError
from aftserve.grpc.wire_types import SERVICE
from aftserve.model.classifier import Classifier
from aftserve.model.load import LoadedModel, load_model
from aftserve.settings import Settings

BUDGET_MIB = 4


@pytest.fixture(scope="module")
def softmax(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("softmax") / "model.bundle"
    return softmax_bundle(Path(shutil.copytree(bundle_folder, folder)))


def loaded(bundle: Path, budget_mib: float = BUDGET_MIB) -> LoadedModel:
    settings = Settings(bundles=[bundle], memory_budget_mib=budget_mib, threads=1)
    return load_model(Bundle.open(bundle), settings, Console(quiet=True))


@pytest.fixture(scope="module")
def model(softmax: Path) -> LoadedModel:
    model = loaded(softmax)
    model.measurement.measure_all()
    return model


def test_longest_document_fits_budget(model: LoadedModel) -> None:
    classifier = model.classifier
    assert 300 < classifier.max_tokens == classifier.whole_tokens < 600
    assert not classifier.in_chunks(classifier.max_tokens)
    classifier.check(np.full(classifier.max_tokens, 5))
    tokens = classifier.max_tokens + 1
    with pytest.raises(
        DocumentTooLongError, match=rf"--memory-budget-mib 4, got {tokens}"
    ) as error:
        classifier.check(np.full(tokens, 5))
    assert "raise --memory-budget-mib to 5 " in str(error.value)


def test_remedy_of_refusal_works(softmax: Path) -> None:
    classifier = loaded(softmax, 5).classifier
    assert classifier.max_tokens > loaded(softmax).classifier.max_tokens
    with pytest.raises(DocumentTooLongError) as refusal:
        classifier.check(np.full(1000, 5))
    needed = int(str(refusal.value).split("--memory-budget-mib to ")[1].split()[0])
    assert len(loaded(softmax, needed).classifier.check(np.full(1000, 5))) == 1000


def test_measured_runs_fit_budget(model: LoadedModel) -> None:
    """No measurement and no batch takes more than the longest document."""
    limit = model.classifier.max_tokens
    shapes = [(one.documents, one.tokens) for one in model.measurement.costs.measurements]
    assert max(tokens for _, tokens in shapes) <= limit
    assert all(documents * tokens**2 <= 1.1 * limit**2 for documents, tokens in shapes)
    lengths = [64, 200, 250, 300] * 20
    for run in shared_runs(
        lengths, model.measurement.costs, budget_tokens=16_384, masks_padding=True
    ):
        longest = max(lengths[index] for index in run)
        assert len(run) * longest**2 <= 1.1 * limit**2


def test_larger_run_releases_memory(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine keeps of earlier runs and the next run stay within the budget together."""
    classifier, released = model.classifier, []
    release = classifier.engine.release
    monkeypatch.setattr(classifier.engine, "release", lambda: released.append(release()))
    classifier.release()
    limit = classifier.max_tokens
    for tokens, count in ((limit // 4, 1), (limit // 3, 1), (limit, 2), (limit, 2), (9, 2)):
        classifier.classify([classifier.blank(tokens)])
        assert len(released) == count


def test_golden_cases_within_budget_run(softmax: Path, model: LoadedModel) -> None:
    assert model.golden
    assert model.breach is None
    assert len(model.golden) < len(loaded(softmax, 4096).golden)
    with pytest.raises(UsageError, match="Raise --memory-budget-mib"):
        loaded(softmax, 1e-5)


def test_cut_documents_fit_budget(softmax: Path) -> None:
    settings = Settings(
        bundles=[softmax], memory_budget_mib=BUDGET_MIB, threads=1, long_documents="head"
    )
    classifier = load_model(Bundle.open(softmax), settings, Console(quiet=True)).classifier
    assert len(classifier.cut(classifier.check(np.full(5000, 5)))) == classifier.max_tokens < 600


def test_predictor_refuses_long_document(softmax: Path) -> None:
    with Predictor(softmax, memory_budget_mib=BUDGET_MIB, threads=1) as predictor:
        short, long = predictor.infer_each([[5] * 100, [5] * 2000])
    assert not isinstance(short, Exception)
    assert isinstance(long, DocumentTooLongError)


@pytest.fixture(scope="module")
def server(softmax: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    log = tmp_path_factory.mktemp("memory") / "log"
    options = ("--memory-budget-mib", str(BUDGET_MIB), "--threads", "1")
    with serving_grpc(softmax, log, *options) as server:
        yield server


def test_long_document_gets_413(server: GrpcServer) -> None:
    limit = http.get(f"{server.http}/info").json()["limits"]["max_tokens"]
    for tokens, status in ((limit, 200), (limit + 1, 413)):
        answer = http.post(f"{server.http}/infer", json={"input_ids": [[5] * tokens]})
        assert answer.status_code == status
    assert "MiB" in answer.json()["detail"]
    assert http.post(f"{server.http}/infer", json={"text": "a " * 5000}).status_code == 413
    request = ids_request("model", [5] * (limit + 1)).SerializeToString()
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refusal:
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(request, timeout=60)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


TEXTS = ("w3 w1 w4 w1 w5", "w9", "w2 w6 w5 w3 w5 w8 w9 w7 w9")


def test_labels_are_those_of_the_file(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    inputs = ("input_ids", "attention_mask", "position_ids")
    path = onnx_texts.saved(tmp_path, onnx_texts.text_model(inputs))
    bundle = export(path, labels=list(LABELS), tokenizer=tmp_path / "tokenizer.json")
    classifier = Classifier(bundle, OnnxRuntimeEngine(bundle.model_path))
    ids = [classifier.encode(text) for text in TEXTS]
    for given, answer in zip(ids, classifier.classify(ids), strict=True):
        logits = onnx_texts.answers(path, given.tolist())
        scores = np.exp(logits) / np.exp(logits).sum()
        head = answer.heads["logits"]
        np.testing.assert_allclose(list(head.scores.values()), scores, atol=1e-6)
        assert head.label == LABELS[int(logits.argmax())]
    with pytest.raises(DocumentTooLongError, match="at most 16 tokens"):
        classifier.encode("w1 " * 17)
    with pytest.raises(InputError, match="outside the vocabulary"):
        classifier.check_ids([VOCABULARY])
