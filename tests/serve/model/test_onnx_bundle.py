"""A bundle of a plain ONNX file is served as any other."""

from pathlib import Path

import numpy as np
import onnx_texts
import pytest
from onnx_texts import LABELS, VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers

from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import InputError
from aftexport.pipeline.export import export
from aftserve.errors import DocumentTooLongError
from aftserve.model.classifier import Classifier

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
