"""Evidence: the passages that contribute most to the logit of a class."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundles import changed_manifest
from clients import http
from hypothesis import given
from hypothesis import strategies as st
from servers import serving
from tiny_models import byte_tokenizer
from tokenizers import Tokenizer, processors

from aftexport import save
from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.chunked.runner import ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import InputError
from aftexport.extra_inputs import NO_EXTRAS, ExtraValues
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.nn.config import MECHANISM_LAYERS
from aftexport.operators.mechanisms import MECHANISMS
from aftexport.pipeline.export import export
from aftserve.client import Client
from aftserve.model.answers import Answer, ExplainedLogit
from aftserve.model.classifier import Classifier
from aftserve.model.documents import TokenizedDocument, check_evidence
from aftserve.model.evidence import Explained, Passage, check, explain, is_spread, passages
from aftserve.model.wanted import EVERY_HEAD, AnswerOptions, Wanted
from aftserve.schemas import Evidence, EvidenceSpan

ADDED = st.lists(st.integers(-5, 5), min_size=1, max_size=40).map(
    lambda numbers: np.array(numbers, np.float32)
)


@given(ADDED, st.integers(1, 50))
def test_passages_have_highest_scores(added: np.ndarray, max_tokens: int) -> None:
    """Each passage is the best run of the tokens that those before it in score left."""
    above = added - added.astype(np.float64).mean()
    gains = above - np.abs(above).mean() / 2
    runs = [
        (start, end)
        for start in range(len(added))
        for end in range(start + 1, min(start + max_tokens, len(added)) + 1)
    ]

    def score(run: tuple[int, int]) -> float:
        return float(gains[slice(*run)].sum())

    found = passages(added, len(added), max_tokens)
    for passage in found:
        assert passage.added == pytest.approx(float(added[passage.start : passage.end].sum()))
        assert passage.above == pytest.approx(float(above[passage.start : passage.end].sum()))
        assert gains[passage.start] > -1e-9
        assert gains[passage.end - 1] > -1e-9
    assert [p.above for p in found] == sorted((p.above for p in found), reverse=True)
    for chosen in sorted(((p.start, p.end) for p in found), key=score, reverse=True):
        best = max(map(score, runs), default=0.0)
        assert chosen in runs
        assert score(chosen) == pytest.approx(best, abs=1e-9)
        runs = [run for run in runs if run[1] <= chosen[0] or chosen[1] <= run[0]]
    assert max(map(score, runs), default=0.0) < 1e-5
    assert passages(added, 1, max_tokens) == found[:1]


def test_passage_of_long_document_stays_in_place() -> None:
    """Chance lengthens no passage up to its maximum, and a larger maximum shows it whole."""
    added = np.random.default_rng(0).normal(0, 0.1, 1 << 20).astype(np.float32)
    added[1000:1020] += 1
    added[5000:5100] += 1
    first, second = passages(added, 2, 64)
    assert 5000 <= first.start < first.end == first.start + 64 <= 5100
    whole, short = passages(added, 2, 256)
    assert whole.start <= 5000
    assert 5100 <= whole.end <= 5120
    assert short.start <= 1000
    assert 1020 <= short.end <= 1040
    assert second.end - second.start <= 64
    assert passages(np.full(1000, 0.1, np.float32), 5, 64) == []


NUMBERS = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("added", "spread"),
    [
        (NUMBERS.normal(size=3000), True),
        (1 + NUMBERS.normal(0, 0.01, 3000), True),
        (np.linspace(-1, 1, 3000), True),
        (np.linspace(0, 1, 3000), True),
        (np.full(3000, 0.1), True),
        (1 + 0.006 * (np.arange(3000) >= 2900), True),
        (np.arange(3000) % 2, True),
        (NUMBERS.normal(0, 0.1, 3000) + (np.arange(3000) // 10 == 100), False),
        (NUMBERS.normal(0, 0.1, 3000) + (np.arange(3000) // 100 == 10), False),
        (np.arange(3000) == 7, False),
    ],
    ids=["noise", "constant and noise", "rise", "positive rise", "constant", "small step",
         "every other", "ten", "hundred", "one"],
)  # fmt: skip
def test_spread_evidence_is_recognized(added: np.ndarray, spread: bool) -> None:
    narrow = added.astype(np.float32)
    assert is_spread(narrow, passages(narrow, 5, 64)) is spread


def planted(state: bool, level: float = 5.0) -> np.ndarray:
    """Return contributions that tokens 1,000 to 1,100 of 3,001 raise, or all after them too."""
    places = np.arange(3001)
    raised = (places >= 1000) & ((places < 1100) | state)
    rows = np.random.default_rng(2).normal(0, 1, 3001) + level * raised
    return (rows / 3001).astype(np.float32)


@pytest.mark.parametrize("state", [False, True])
def test_causal_passage_begins_raised_rows(state: bool) -> None:
    added = planted(state)
    found = passages(added, 3, 64, is_causal=True)
    assert 1000 <= found[0].start < found[0].end <= 1100
    assert found[0].until == pytest.approx(3001 if state else 1100, abs=5)
    rows = slice(found[0].start, found[0].until)
    assert found[0].added == pytest.approx(float(added[rows].sum(dtype=np.float64)))
    assert not is_spread(added, found)


@pytest.mark.parametrize(
    "added", [np.linspace(0, 1, 3000), np.linspace(-1, 1, 3000), 1 + planted(True, 0.006)]
)
def test_causal_rise_is_spread(added: np.ndarray) -> None:
    assert is_spread(added, passages(added, 3, 64, is_causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISM_LAYERS)
def test_planted_words_come_first(mechanism: str, causal: bool) -> None:
    """The first passage lies within the planted place, and is at most twice as long."""
    model = deciding(mechanism, "mean", causal)
    rows: list[torch.Tensor] = []
    model.pooling.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0]))
    ids = torch.randint(97, 123, (1, 391), generator=torch.Generator().manual_seed(3))
    ids[:, 100:140] = tokenizer().token_to_id("Z")
    with torch.no_grad():
        logits = model(ids, lengths=torch.tensor([391]))
        added = (rows[0][0] @ model.head.weight[2] / 391).numpy()
    assert logits.argmax() == 2
    found = passages(added, 3, 64, is_causal=causal)
    assert 100 <= found[0].start < found[0].end <= 140
    assert not is_spread(added, found)


TEXT = "an ordinary beginning, then something else, and an ordinary end " * 3


def test_text_passages_descend_by_contribution(server: str) -> None:
    answer = ask(server, 100, json={"text": TEXT})
    evidence = answer["evidence"]
    assert evidence["spans"]
    for span in evidence["spans"]:
        assert TEXT[span["start"] : span["end"]] == span["text"]
        assert 0 <= span["start_token"] < span["end_token"] <= answer["tokens_used"]
    above = [span["above_average"] for span in evidence["spans"]]
    assert above == sorted(above, reverse=True)
    assert ask(server, 1, json={"text": TEXT})["evidence"]["spans"] == evidence["spans"][:1]


def test_deletion_shows_document_without_passage(server: str) -> None:
    with Client(server, deadline=30) as client:
        label = client.infer(TEXT).label
        assert label is not None
        (found,) = client.infer(TEXT, evidence=3, evidence_check=2, explain=label).explained or ()
        checked = [span for span in found.spans if span.drop is not None]
        assert len(checked) == (1 if found.spread else 2)
        for span in checked:
            rest = TEXT[: span.start] + TEXT[span.end :]
            (left,) = client.infer(rest, evidence=1, explain=label).explained or ()
            assert span.logit_without == pytest.approx(left.logit, abs=1e-5)
            assert span.drop == pytest.approx(found.logit - left.logit, abs=1e-5)
        alone = client.infer(TEXT, evidence_check=1).evidence
        assert alone is not None
        assert alone.spans[0].drop == pytest.approx(found.spans[0].drop, abs=1e-5)
        (single,) = client.infer([[1]], evidence=1, evidence_check=1)
        assert single.evidence is not None
        assert not single.evidence.spans


@given(st.integers(2, 3000), st.data())
def test_search_finds_planted_tokens(tokens: int, data: st.DataObject) -> None:
    """A document whose rows are all equal has its passage by deletion."""
    start = data.draw(st.integers(0, tokens - 1))
    ids = np.zeros(tokens, np.int64)
    ids[start : start + 100] = 1

    def answer_for(ids: np.ndarray) -> Answer:
        logit = float(ids.mean())
        equal = ExplainedLogit("logits", "a", logit, 0.0, np.full(len(ids), logit), 0, 1)
        return Answer({}, {"logits": np.array([logit])}, explained=(equal,))

    one = TokenizedDocument(ids, ids, ids, 0, 0.0, None, NO_EXTRAS)
    evidence = Evidence(logit=float(ids.mean()), offset=0.0, spread=True, spans=[])

    def span(passage: Passage) -> EvidenceSpan:
        return EvidenceSpan(
            start_token=passage.start, end_token=passage.end, contribution=0.0, above_average=0.0
        )

    runs = check(one, answer_for(ids), Explained([evidence], span), AnswerOptions(3, checks=2))
    count = 0
    with suppress(StopIteration):
        documents, wanted = next(runs)
        while True:
            assert wanted.heads == {"logits"}
            count += len(documents)
            documents, wanted = runs.send([answer_for(left.used[:]) for left in documents])
    assert count <= 25
    (found,) = evidence.spans
    assert found.end_token - found.start_token <= 64
    assert ids[found.start_token : found.end_token].any()
    assert found.logit_without == float(
        np.delete(ids, slice(found.start_token, found.end_token)).mean()
    )
    assert found.drop == evidence.logit - found.logit_without


@given(st.integers(2, 30), st.data())
def test_document_without_passage_has_others(tokens: int, data: st.DataObject) -> None:
    """The tokens and their extra inputs are those of a document that was sent without them."""
    numbers = np.arange(tokens)
    start, first = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, tokens))
    end = data.draw(st.integers(start + 1, tokens))
    given_extras = ExtraValues({"age": np.array(1.0)}, {"depth": numbers * 2})
    one = TokenizedDocument("a", numbers, numbers, 0, 0.0, None, given_extras)
    left, expected = one.without(start, end), np.delete(numbers, slice(start, end))
    assert len(left.used) == len(expected)
    assert left.used.tolist() == expected.tolist()
    last = data.draw(st.integers(first, tokens))
    assert left.used[first:last].tolist() == expected[first:last].tolist()
    assert left.extras.tokens["depth"].tolist() == (expected * 2).tolist()
    assert left.extras.document == given_extras.document


def test_id_passages_have_no_text(server: str) -> None:
    answer = ask(server, 1, json={"input_ids": [[1, 2, 3, 4, 200, 5]]})["results"][0]
    (span,) = answer["evidence"]["spans"]
    assert "text" not in span
    assert span["end_token"] <= 6


def test_plain_text_and_lines_get_evidence(server: str) -> None:
    plain = ask(server, 2, content=TEXT, headers={"Content-Type": "text/plain"})
    lines = {"Content-Type": "application/x-ndjson"}
    line = ask(server, 2, content=json.dumps({"text": TEXT}) + "\n", headers=lines)
    assert plain["evidence"] == line["evidence"]


def test_info_shows_evidence_support(server: str, bundle_copy: Path, tmp_path: Path) -> None:
    assert http.get(f"{server}/info").json()["evidence"] is True
    without = changed_manifest(bundle_copy, {"evidence_heads": None, "no_evidence": "Tanh stands"})
    with serving(without, tmp_path / "log") as (address, _):
        assert http.get(f"{address}/info").json()["evidence"] is False


def test_evidence_is_absent_by_default(server: str) -> None:
    answer = http.post(f"{server}/infer", json={"text": TEXT}, timeout=30).json()
    assert "evidence" not in answer


@pytest.mark.parametrize("query", ["-1", "101", "all", "3&evidence_tokens=0", "3&evidence_check=6"])
def test_invalid_passage_count_is_refused(server: str, query: str) -> None:
    response = http.post(f"{server}/infer?evidence={query}", json={"text": TEXT}, timeout=30)
    assert response.status_code == 422


def ask(server: str, spans: int, **request: Any) -> Any:
    response = http.post(f"{server}/infer?evidence={spans}", timeout=30, **request)
    assert response.status_code == 200, response.text
    return json.loads(response.text)


def deciding(mechanism: str, pooling: str, causal: bool = False) -> DocumentClassifier:
    """Return a model in which only the letter Z contributes to class c."""
    torch.manual_seed(0)
    config = ClassifierConfig(
        mechanism=mechanism, vocab_size=257, num_labels=3, dim=32, depth=1, num_heads=2, ffn_dim=32,
        window=5, pooling=pooling, causal=causal,
        max_length=400 if mechanism == "aft_full" else None,
    )  # fmt: skip
    model = DocumentClassifier(config).eval()
    with torch.no_grad():
        # Each class has a direction of mean zero, which the last norm does not change.
        directions = torch.zeros(3, 32)
        for label in range(3):
            directions[label, 2 * label : 2 * label + 2] = torch.tensor([1.0, -1.0])
        model.head.weight.copy_(directions)
        model.head.bias.zero_()
        model.embedding.weight[:, :6] = 0
        for token in ("Z", "[END]"):
            model.embedding.weight[tokenizer().token_to_id(token)] = directions[2]
        for layer in model.encoder.layers:
            for weight in (*layer.attention.parameters(), *layer.ffn.parameters()):
                weight.mul_(0.2)
    return model


def tokenizer() -> Tokenizer:
    """Return a byte tokenizer that appends a token without characters."""
    found = byte_tokenizer()
    found.add_special_tokens(["[END]"])
    found.post_processor = processors.TemplateProcessing(
        single="$A [END]", special_tokens=[("[END]", found.token_to_id("[END]"))]
    )
    return found


def deciding_bundle(mechanism: str, pooling: str, folder: Path, causal: bool = False) -> Bundle:
    model = deciding(mechanism, pooling, causal)
    labels, content = ["a", "b", "c"], tokenizer().to_str()
    save(folder / "model.pt", model=model, labels=labels, tokenizer=content)
    return export(folder / "model.pt", out=folder / "model.bundle")


def default(classifier: Classifier) -> Wanted:
    """Return the request for the evidence of the largest logit."""
    return AnswerOptions(spans=1).wanted(classifier.manifest)


def classifier_of(bundle: Bundle) -> Classifier:
    return Classifier(bundle, OnnxRuntimeEngine(bundle.model_path))


@pytest.mark.table(keep=0.1, by=lambda mechanism, pooling, causal: (pooling, causal))
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("pooling", ["mean", "attention"])
@pytest.mark.parametrize("causal", [False, True])
def test_deciding_passage_comes_first(
    mechanism: str, pooling: str, causal: bool, tmp_path: Path
) -> None:
    classifier = classifier_of(deciding_bundle(mechanism, pooling, tmp_path, causal))
    document = "some ordinary words " * 5 + "ZZZZZZZZZZ" + " and others after it" * 5
    ids, wanted = classifier.tokenize(document), default(classifier)
    (answer,) = classifier.classify([ids], wanted=[wanted])
    (found,) = explain(classifier, document, answer, first=0, options=AnswerOptions(3)).evidence
    assert answer.heads["logits"].label == "c"
    assert (found.spans[0].start_token, found.spans[0].end_token) == (100, 110)
    assert found.spans[0].text == "ZZZZZZZZZZ"
    assert found.spans[0].until_token == (110 if causal else None)
    assert not found.spread
    (one,) = answer.explained
    assert one.added.flags.owndata  # the answer keeps no engine memory alive
    assert one.added.sum() + found.offset == pytest.approx(found.logit, abs=1e-4)


def test_missing_evidence_gets_reason(tmp_path: Path) -> None:
    bundle = deciding_bundle("aft_simple", "attention", tmp_path)
    engine, plan = OnnxRuntimeEngine(bundle.model_path), bundle.manifest.chunked
    assert plan is not None
    chunked = ChunkedModel(bundle.path / CHUNKED, plan)
    chunked.whole_tokens = 10
    classifier = Classifier(bundle, engine, chunked=chunked)
    wanted = default(classifier)
    check_evidence(classifier, wanted, 10)
    check_evidence(classifier, EVERY_HEAD, 11)
    with pytest.raises(InputError, match="11 tokens and runs in chunks"):
        check_evidence(classifier, wanted, 11)
    manifest = bundle.manifest.model_copy(
        update={"evidence_heads": None, "no_evidence": "Tanh stands"}
    )
    with pytest.raises(InputError, match="Tanh stands"):
        AnswerOptions(spans=1).wanted(manifest)


def test_special_token_has_no_characters(tmp_path: Path) -> None:
    classifier = classifier_of(deciding_bundle("aft_simple", "mean", tmp_path))
    for document, shown in (("ordinary words, then ZZ", "ZZ"), ("ordinary words", None)):
        ids, wanted = classifier.tokenize(document), default(classifier)
        (answer,) = classifier.classify([ids], wanted=[wanted])
        (found,) = explain(classifier, document, answer, first=0, options=AnswerOptions(1)).evidence
        (span,) = found.spans
        assert span.end_token == len(document) + 1
        assert span.text == shown
