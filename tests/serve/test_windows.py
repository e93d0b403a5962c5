"""A bundle with a policy of windows answers as PyTorch with the same windows, everywhere."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import served_heads
import torch
import transformers_folders as folders
from bundles import changed_manifest, resealed
from clients import http
from conftest import MakeOnce
from grpc_servers import GrpcServer, ids_request, method, serving_grpc
from numpy.typing import NDArray
from rich.console import Console

from aftexport.bundle.bundle import Bundle, write_golden
from aftexport.bundle.golden import IN_WINDOWS
from aftexport.calibration.data import read_labelled_documents, run_documents
from aftexport.deploy.inspection import show_bundle
from aftexport.errors import BundleError, InputError, UsageError
from aftexport.options import ModelSource
from aftexport.pipeline.export import export
from aftexport.verify.check import Request, check
from aftserve.batch import output
from aftserve.batch.answering import OfflineClassifier
from aftserve.errors import DocumentTooLongError
from aftserve.predictor import Predictor
from aftserve.settings import Settings

WINDOW, STRIDE, CLS, SEP = 512, 384, 2, 3
CONTENT = WINDOW - 2
LENGTHS = (1, 510, 511, 2_000, 20_000)
GENERATOR = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(make_once: MakeOnce) -> Path:
    """A folder with ``bert``, of 512 positions, and ``bert.bundle`` with windows of all of them."""

    def make(folder: Path) -> None:
        config = folders.bert(
            max_position_embeddings=WINDOW, num_hidden_layers=1, **folders.named(("safe", "attack"))
        )
        folders.save(folder / "bert", "BertForSequenceClassification", config)
        export(
            folder / "bert", out=folder / "bert.bundle", long_documents="windows", aggregate="max"
        )

    return make_once("bert in windows", make)


def changed(bundle: Path, copy: Path, windows: dict[str, Any] | None) -> Path:
    """Return a copy of a bundle with other windows."""
    shutil.copytree(bundle, copy)
    if windows is None:
        cases = Bundle.open(bundle).golden()
        write_golden(copy, [case for case in cases if case.subject != IN_WINDOWS])
        resealed(copy)
    changed_manifest(copy, {"windows": windows})
    return copy


def policy(aggregate: str, **changes: Any) -> dict[str, Any]:
    backgrounds = {"logits": "safe"} if aggregate in ("max", "noisy_or") else {}
    return {
        "tokens": WINDOW, "stride": STRIDE, "prefix": [CLS], "suffix": [SEP],
        "aggregate": aggregate, "backgrounds": backgrounds, **changes,
    }  # fmt: skip


def documents() -> list[str]:
    """Texts of ``LENGTHS`` tokens without those that the tokenizer adds."""
    words = ["ada", "in", "and", "a", "3", ",", "!"]
    return [" ".join(GENERATOR.choice(words, tokens)) for tokens in LENGTHS]


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[str]:
    found = documents()
    tokenizer = Bundle.open(folder / "bert.bundle").tokenizer()
    assert tokenizer is not None
    assert [len(tokenizer.encode(text)) - 2 for text in found] == [*LENGTHS]
    return found


@pytest.fixture(scope="module")
def window_logits(folder: Path, texts: list[str]) -> list[NDArray[np.float64]]:
    """PyTorch's logits in float64 ``[windows, 2]`` of each text, and its own cut."""
    import transformers

    library = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    model = transformers.BertForSequenceClassification.from_pretrained(folder / "bert")
    found = []
    for text in texts:
        ids = library(text, add_special_tokens=False)["input_ids"]
        starts = [0]
        while starts[-1] + CONTENT < len(ids):
            starts.append(min(starts[-1] + STRIDE, len(ids) - CONTENT))
        windows = torch.tensor([[CLS, *ids[s : s + CONTENT], SEP] for s in starts])
        with torch.inference_mode():
            found.append(model.double()(windows).logits.numpy())
    return found


def expected_scores(aggregate: str, logits: NDArray[np.float64], tokens: int) -> float:
    """Return the probability of an attack by the formulas of the documentation."""
    p = torch.tensor(logits).softmax(1).numpy()
    starts = [min(i * STRIDE, max(tokens - CONTENT, 0)) for i in range(len(p))]
    centers = np.array(starts) + (min(CONTENT, tokens) - 1) / 2
    owners = np.abs(np.arange(tokens)[:, None] - centers).argmin(1)
    weights = np.bincount(owners, minlength=len(p))[:, None] / tokens
    match aggregate:
        case "max":
            return float(p[:, 1].max())
        case "noisy_or":
            return float(1 - p[:, 0].prod())
        case "mean":
            mean = np.exp((weights * np.log(p)).sum(0))
        case _:
            mean = (weights * p).sum(0)
    return float(mean[1] / mean.sum())


@pytest.mark.parametrize("aggregate", ["max", "mean", "logsumexp", "noisy_or"])
def test_predictor_equals_pytorch(
    aggregate: str, folder: Path, texts: list[str], window_logits: list[NDArray[np.float64]],
    tmp_path: Path,
) -> None:  # fmt: skip
    bundle = changed(folder / "bert.bundle", tmp_path / "copy.bundle", policy(aggregate))
    with Predictor(bundle, threads=1) as predictor:
        answers = [predictor(text) for text in texts]
    for tokens, logits, answer in zip(LENGTHS, window_logits, answers, strict=True):
        assert answer.scores is not None
        expected = expected_scores(aggregate, logits, tokens)
        assert answer.scores["attack"] == pytest.approx(expected, abs=1e-5)
        assert (answer.policy, answer.truncated) == ("windows", False)
        assert answer.tokens_total == answer.tokens_used == tokens + 2
        found = answer.windows
        assert found is not None
        assert (found["count"], found["tokens"], found["stride"]) == (len(logits), WINDOW, STRIDE)
        for decided in found["decided"]:
            is_own = aggregate == "logsumexp" and decided["name"] == "safe"
            margins = (logits[:, 1] - logits[:, 0]) * (-1 if is_own else 1)
            assert margins[decided["window"]] == pytest.approx(margins.max(), abs=1e-5)
            assert decided["end_token"] - decided["start_token"] == CONTENT
            assert decided["start_token"] <= 1 + tokens - CONTENT
        decides = aggregate != "mean" and len(logits) > 1
        assert [one["name"] for one in found["decided"]] == ["safe", "attack"] * decides


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    log = tmp_path_factory.mktemp("windows") / "log"
    with serving_grpc(folder / "bert.bundle", log, "--threads", "1") as server:
        yield server
    assert "Traceback" not in log.read_text("utf-8")


def test_interfaces_give_windows(
    server: GrpcServer, folder: Path, texts: list[str], window_logits: list[NDArray[np.float64]]
) -> None:
    bundle = Bundle.open(folder / "bert.bundle")
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    with Predictor(bundle.path, threads=1) as predictor:
        wanted = [asdict(answer) for answer in predictor(texts)]
    served = http.post(f"{server.http}/infer", json={"texts": texts}).json()["results"]
    settings = Settings(bundles=[bundle.path], threads=1)
    outcomes = list(OfflineClassifier(settings).answer(texts))
    columns = output.schema(bundle.manifest.heads, None, has_windows=True)
    rows = output.table(None, outcomes, columns, policy="windows", bundle="").to_pylist()
    with grpc.insecure_channel(server.grpc) as channel:
        infer = method(channel, "ModelInfer")
        of_grpc = [infer(ids_request("bert", tokenizer.encode(t).ids), timeout=60) for t in texts]
    for one, other, row, message in zip(wanted, served, rows, of_grpc, strict=True):
        windows = one["windows"]
        assert windows == other["windows"] == row["windows"]
        assert row["policy"] == other["policy"] == "windows"
        assert message.parameters["policy"].string_param == "windows"
        assert f'"count":{windows["count"]},' in message.parameters["windows"].string_param
        for scores in (other["scores"], row["scores"]):
            assert scores == pytest.approx(one["scores"], abs=1e-6)
    described = http.get(f"{server.http}/info").json()["limits"]
    assert described["long_documents"] == "windows"
    assert (described["max_tokens"], described["whole_tokens"]) == (1 << 20, WINDOW)
    assert described["windows"]["tokens"] == WINDOW


def test_evidence_in_windows_is_refused(server: GrpcServer, texts: list[str]) -> None:
    answer = http.post(f"{server.http}/infer", params={"evidence": 1}, json={"text": texts[3]})
    assert answer.status_code == 422
    assert "evidence" in answer.json()["detail"]


@pytest.mark.parametrize("setting", ["exact", "reject"])
def test_refusal_names_option(setting: str, folder: Path, texts: list[str], tmp_path: Path) -> None:
    """Without the policy, or with another one of the server, a longer document is refused."""
    windows = None if setting == "exact" else policy("max")
    bundle = changed(folder / "bert.bundle", tmp_path / "copy.bundle", windows)
    with (
        Predictor(bundle, threads=1, long_documents=setting) as predictor,  # type: ignore[arg-type]
        pytest.raises(DocumentTooLongError, match="--long-documents windows"),
    ):
        predictor(texts[2])


def test_head_cuts_in_place_of_windows(folder: Path, texts: list[str]) -> None:
    with Predictor(folder / "bert.bundle", threads=1, long_documents="head") as predictor:
        answer = predictor(texts[3])
    assert (answer.policy, answer.tokens_used, answer.windows) == ("head", WINDOW, None)


def test_budget_must_fit_window(folder: Path) -> None:
    with pytest.raises(UsageError, match="fits a window of 512 tokens"):
        Predictor(folder / "bert.bundle", threads=1, memory_budget_mib=0.1)


def test_verify_compares_all_windows(folder: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(folder / "bert.bundle")
    report = check(bundle, Request(source=ModelSource(folder / "bert")), Console(quiet=True))
    (result,) = [one for one in report.comparisons if one.subject == IN_WINDOWS]
    assert result.passed
    assert result.shape == (1, 2 + CONTENT + 2 * STRIDE + 7)
    case = next(one for one in bundle.golden() if one.subject == IN_WINDOWS)
    assert len(case.outputs["logits"]) == 4
    console = Console(file=StringIO(), width=200)
    show_bundle(bundle, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "512 tokens (2 of them added by the tokenizer) every 384, answer by max" in shown
    assert "background of logits: safe" in shown


EVERY = {"tokens": 40, "stride": 25, "aggregate": "max", "backgrounds": {"topic": "letter"}}


def test_golden_windows_need_policy(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.bundle"
    shutil.copytree(folder / "bert.bundle", copy)
    changed_manifest(copy, {"windows": None})
    with pytest.raises(BundleError, match="cases of windows"):
        Bundle.open(copy).golden()


def test_calibration_fits_all_windows(
    folder: Path, texts: list[str], window_logits: list[NDArray[np.float64]], tmp_path: Path
) -> None:
    lines = [json.dumps({"text": text, "label": "safe"}) for text in texts[:4]]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    bundle = Bundle.open(folder / "bert.bundle")
    documents = read_labelled_documents(
        tmp_path / "data.jsonl", bundle.manifest, bundle.tokenizer()
    )
    sample = run_documents(bundle, documents, progress=lambda *_: None)["logits"]
    found = [sample.head.scores(row)[1] for row in sample.logits]
    expected = map(expected_scores, ["max"] * 4, window_logits, LENGTHS)
    assert found == pytest.approx([*expected], abs=1e-5)


def test_every_head_joins_windows(heads_bundle: Path, tmp_path: Path) -> None:
    """Tokens have the answer of their most central window, and vectors are means by tokens."""
    bundle = changed(heads_bundle, tmp_path / "every.bundle", EVERY)
    text = "An invoice of 3 May from Ada, and more of it. " * 4
    ids = [*text.encode()]
    starts = [*range(0, len(ids) - 40, 25), len(ids) - 40]
    outputs = [served_heads.outputs(ids[s : s + 40]) for s in starts]
    centers = np.array(starts) + 19.5
    owners = np.abs(np.arange(len(ids))[:, None] - centers).argmin(1)
    rows = np.array([outputs[o]["tags"][t - starts[o]].numpy() for t, o in enumerate(owners)])
    heads = Bundle.open(bundle).manifest.heads
    with Predictor(bundle, threads=1) as predictor:
        answer = predictor(text)
        (of_ids,) = predictor([ids])
    assert answer.heads is not None
    tags = heads["tags"].answer(rows)
    assert [*(answer.heads["tags"].labels or ())] == [*tags.labels]  # type: ignore[attr-defined]
    spans = [(s.start_token, s.end_token, s.label) for s in answer.heads["tags"].spans or ()]
    assert spans == [(s.start_token, s.end_token, s.label) for s in tags.spans]  # type: ignore[attr-defined]
    weights = np.bincount(owners)[:, None] / len(ids)
    mean = (weights * np.stack([one["embedding"].numpy() for one in outputs])).sum(0)
    vector = heads["embedding"].scores(mean)
    np.testing.assert_allclose(answer.heads["embedding"].vector, vector, atol=1e-5)
    ages = [float(heads["age"].scores(one["age"].numpy())[0]) for one in outputs]
    assert answer.heads["age"].values == pytest.approx({"years": max(ages)}, rel=1e-5)
    paid = [float(one["paid"].sigmoid()) for one in outputs]
    assert answer.heads["paid"].scores["yes"] == pytest.approx(max(paid), abs=1e-6)  # type: ignore[index, call-overload]
    topics = [one["topic"].softmax(0).numpy() for one in outputs]
    found = [*(answer.heads["topic"].scores or {}).values()]  # type: ignore[union-attr]
    np.testing.assert_allclose(found, min(topics, key=lambda row: row[2]), atol=1e-6)
    assert of_ids.heads is not None
    assert of_ids.heads["tags"].labels == answer.heads["tags"].labels
    assert of_ids.heads["embedding"] == answer.heads["embedding"]
    with pytest.raises(InputError, match="read in windows"):
        Predictor(bundle, threads=1)(text, evidence=1)
