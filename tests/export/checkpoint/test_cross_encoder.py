"""Folders of a CrossEncoder, and other models of pairs, give the answers of transformers."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_pairs
import transformers
import transformers_folders as folders
from text_pairs import PAIRS, change

from aftexport.bundle.tokenizer import parse_tokenizer
from aftexport.checkpoint import load
from aftexport.errors import CheckpointError, UsageError
from aftexport.pipeline.export import export
from aftserve.predictor import Predictor


@pytest.mark.parametrize(
    ("kind", "form", "task"),
    [
        ("Bert", "version 6", "multi_label_classification"),
        ("Bert", "version 5", "regression"),
        ("Roberta", "version 3", "regression"),
        ("XLMRoberta", "version 6", "multi_label_classification"),
    ],
)
def test_answers_are_those_of_library(kind: str, form: str, task: str, tmp_path: Path) -> None:
    """The scores are those of the activation, of which Sigmoid is the default for one label."""
    folder = tmp_path / "model"
    text_pairs.save(folder, kind, form)
    bundle = export(folder, out=tmp_path / "pairs.bundle")
    (head,) = bundle.manifest.heads.values()
    assert (head.task, bundle.manifest.text_pairs) == (task, True)
    assert ("token_type_ids" in bundle.manifest.inputs) is (kind == "Bert")
    expected = text_pairs.logits(folder, PAIRS)
    if task != "regression":
        expected = 1 / (1 + np.exp(-expected))
    with Predictor(bundle.path) as predictor:
        answers = [one.heads["logits"] for one in predictor(PAIRS)]
    found = [list((one.values if task == "regression" else one.scores).values()) for one in answers]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_long_pairs_are_cut_as_library_does(tmp_path: Path) -> None:
    text_pairs.save(tmp_path / "model")
    bundle = export(tmp_path / "model", out=tmp_path / "pairs.bundle")
    pairs = [("Ada " * 40, "Grace " * 20), ("Ada " * 4, "Istanbul " * 60), *PAIRS[:1]]
    expected = 1 / (1 + np.exp(-text_pairs.logits(tmp_path / "model", pairs)))
    with Predictor(bundle.path, long_documents="head") as predictor:
        answers = predictor(pairs)
    found = [[*one.heads["logits"].scores.values()] for one in answers]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert [one.truncated for one in answers] == [True, True, False]
    assert [one.tokens_used for one in answers][:2] == [folders.MAX_TOKENS] * 2
    with Predictor(bundle.path) as predictor:
        (refused, other) = predictor.infer_each([pairs[0], pairs[2]])
    assert "With --long-documents head it cuts the longer of two texts" in str(refused)
    assert not isinstance(other, Exception)


@pytest.mark.parametrize("build", [folders.wordpiece, folders.byte_level_bpe, folders.unigram])
def test_tokens_of_random_pairs_equal(build: Any) -> None:
    """Ids and types are those of transformers, also where a truncation cuts one or both texts."""
    text = build().to_str()
    ours, cutting, own = (parse_tokenizer(text) for _ in range(3))
    library = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
    library.model_input_names = ["input_ids", "token_type_ids"]
    cutting.enable_truncation(24, strategy="longest_first")
    generator = random.Random(0)
    words = " ".join((*folders.TEXTS, "", "\u0130 \t\n <s> [SEP]")).split(" ")
    for _ in range(300):
        texts = [" ".join(generator.choices(words, k=generator.randint(0, 12))) for _ in range(2)]
        for tokenizer, options in ((ours, {}), (cutting, {"truncation": True, "max_length": 24})):
            encoded = tokenizer.encode(*texts)
            expected = library(*([text] for text in texts), **options)
            assert [encoded.ids] == expected["input_ids"]
            assert [encoded.type_ids] == expected["token_type_ids"]


def test_folder_of_library_takes_pairs(tmp_path: Path) -> None:
    """Three labels of NLI need --text-pairs; types follow the tokenizer's model_input_names."""
    folder = tmp_path / "model"
    config = folders.bert(**folders.named(text_pairs.NLI))
    folders.save(folder, "BertForSequenceClassification", config)
    for name in ("TokenizersBackend", "BertTokenizer"):
        change(folder / "tokenizer_config.json", tokenizer_class=name)
        bundle = export(folder, out=tmp_path / f"{name}.bundle", text_pairs=True)
        assert ("token_type_ids" in bundle.manifest.inputs) is (name == "BertTokenizer")
        logits = text_pairs.logits(folder, PAIRS)
        expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        with Predictor(bundle.path) as predictor:
            found = [list(one.scores.values()) for one in predictor(PAIRS)]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def without_post_processor() -> Any:
    tokenizer = folders.wordpiece()
    tokenizer.post_processor = None
    return tokenizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "--text-pairs needs a tokenizer, got a model without one"),
        ({"long_documents": "windows"}, "needs whole documents, got --long-documents windows"),
        ({"to": "trt-rtx"}, "--text-pairs with token_type_ids needs --to onnx"),
        ({"tokenizer": without_post_processor()}, "whose post-processor joins two texts"),
        (
            {"inputs": {"token_type_ids": "token_category:1"}},
            "token types must be at most 0, as the model's, got 1",
        ),
    ],
)
def test_unfit_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        text_pairs.export_nli(tmp_path / "nli.bundle", **options)


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        ("modules.json", None, "expected one Transformer in the folder itself"),
        (
            "config_sentence_transformers.json",
            {"activation_fn": "torch.nn.modules.activation.Tanh"},
            "activation torch.nn.Sigmoid or torch.nn.Identity, got torch.nn.modules",
        ),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "query", "prompts": {"query": "query: "}},
            "no default_prompt_name",
        ),
        ("sentence_bert_config.json", {"transformer_task": "text-generation"}, "transformer_task"),
    ],
)
def test_other_cross_encoders_are_refused(
    file: str, entries: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    text_pairs.save(tmp_path)
    if entries is None:
        (tmp_path / file).write_text("[]")
    else:
        change(tmp_path / file, **entries)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
