"""A folder of transformers is served with the labels and scores of the library's pipeline."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import transformers_folders as folders
from sampling import any_case

from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.pipeline.export import export
from aftexport.verify.reference_model import load_source, torch_engine
from aftserve.errors import DocumentTooLongError
from aftserve.model.classifier import Classifier
from aftserve.model.documents import TokenAnswers

NAMED = folders.named(folders.LABELS)
MULTI_LABEL = {**folders.named(("urgent", "legal")), "problem_type": "multi_label_classification"}
CLASSIFIERS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "BERT, WordPiece": ("BertForSequenceClassification", folders.bert(**NAMED), {}),
    "RoBERTa, BPE, shards": (
        "RobertaForSequenceClassification",
        folders.roberta(num_labels=2),
        {"max_shard_size": "20KB"},
    ),
    "XLM-R, Unigram, labels at once": (
        "XLMRobertaForSequenceClassification",
        folders.xlm_roberta(**MULTI_LABEL),
        {},
    ),
    "ModernBERT": ("ModernBertForSequenceClassification", folders.modernbert(**NAMED), {}),
}


def exported(folder: Path) -> Bundle:
    return export(folder, out=folder.with_suffix(".bundle"))


def served(bundle: Bundle) -> Classifier:
    return Classifier(bundle, OnnxRuntimeEngine(bundle.model_path))


@contextmanager
def pipeline_of(task: str, folder: Path, **options: Any) -> Iterator[Any]:
    """Return a pipeline of a folder in float32."""
    given = {"model": str(folder), "tokenizer": str(folder), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about its own arguments
        yield transformers.pipeline(task, dtype=torch.float32, **given)


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_labels_and_scores_are_the_pipelines(kind: str, tmp_path: Path) -> None:
    class_name, config, settings = CLASSIFIERS[kind]
    folder = tmp_path / "model"
    folders.save(folder, class_name, config, **settings)
    bundle = exported(folder)
    classifier = served(bundle)
    assert bundle.manifest.max_tokens == folders.MAX_TOKENS
    assert classifier.masks_padding
    ids = [classifier.encode(text) for text in folders.TEXTS]
    answers = [answer.heads["logits"] for answer in classifier.classify(ids)]  # one padded run
    with pipeline_of("text-classification", folder, top_k=None) as pipeline:
        for text, answer in zip(folders.TEXTS, answers, strict=True):
            (expected,) = pipeline([text])
            scores: dict[str, float] = answer.scores
            assert scores.keys() == {one["label"] for one in expected}
            for one in expected:
                assert scores[one["label"]] == pytest.approx(one["score"], abs=1e-5)
            if hasattr(answer, "label"):
                assert answer.label == expected[0]["label"]
            else:
                assert set(answer.labels) == {e["label"] for e in expected if e["score"] >= 0.5}


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    folder = tmp_path_factory.mktemp("tagger") / "model"
    config = folders.bert(**folders.named(folders.TAGS))
    folders.save(folder, "BertForTokenClassification", config)
    return folder, exported(folder)


@pytest.mark.parametrize("aggregation", ["simple", "first", "average", "max"])
def test_spans_are_the_pipelines(aggregation: str, tagger: tuple[Path, Bundle]) -> None:
    folder, bundle = tagger
    head = bundle.manifest.heads["logits"].model_copy(update={"aggregation": aggregation})
    manifest = bundle.manifest.model_copy(update={"heads": {"logits": head}})
    classifier = served(replace(bundle, manifest=manifest))
    task = "token-classification"
    count = 0
    with pipeline_of(task, folder, aggregation_strategy=aggregation) as pipeline:
        for text in folders.TEXTS:
            encoded = classifier.encode_marked(text)
            marks = encoded.marks
            assert marks is not None
            (answer,) = classifier.classify([encoded.ids], decodings=[marks.decoding])
            answers = TokenAnswers(manifest.heads, answer.tokens, 0, text, marks.characters)
            spans = answers.answer("logits").spans
            expected = pipeline(text)
            assert [(s.label, s.start, s.end) for s in spans] == [
                (one["entity_group"], one["start"], one["end"]) for one in expected
            ]
            np.testing.assert_allclose(
                [s.score for s in spans], [one["score"] for one in expected], atol=1e-5
            )
            count += len(spans)
    assert count >= len(folders.TEXTS)


def test_bundle_is_verified_against_its_folder(tagger: tuple[Path, Bundle]) -> None:
    """``aftexport verify --model`` and ``aftserve --reference`` read the folder again."""
    folder, bundle = tagger
    engine = torch_engine(bundle, load_source(bundle, folder), double=True)
    case = next(case for case in bundle.golden() if case.name == "padded batch")
    found = engine.run(case.inputs)["logits"]
    for row, length in enumerate(case.inputs["lengths"].tolist()):
        np.testing.assert_allclose(
            found[row, :length], case.outputs["logits"][row, :length], rtol=1e-9, atol=1e-12
        )


def test_document_over_the_positions_is_refused(tagger: tuple[Path, Bundle]) -> None:
    """The tables of positions end: the server refuses a longer text instead of failing on it."""
    classifier = served(tagger[1])
    with pytest.raises(DocumentTooLongError, match=f"at most {folders.MAX_TOKENS} tokens"):
        classifier.encode(folders.TEXTS[0] * 20)


def test_vectors_are_the_pipelines(tmp_path: Path) -> None:
    """A base class gives a vector for each token; T5 has no table of positions and no limit."""
    folder = tmp_path / "model"
    folders.save(folder, "T5EncoderModel", folders.t5())
    bundle = exported(folder)
    assert bundle.manifest.heads["logits"].task == "feature_extraction"
    classifier = served(bundle)
    model = transformers.T5EncoderModel.from_pretrained(str(folder))  # AutoModel has a decoder
    with pipeline_of("feature-extraction", folder, model=model) as pipeline:
        for text in folders.TEXTS:
            (answer,) = classifier.classify([classifier.encode(text)])
            vectors = answer.tokens["logits"].answer().vectors
            np.testing.assert_allclose(vectors, pipeline(text)[0], rtol=1e-4, atol=1e-4)
