import numpy as np
import pytest

from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import Document, tokenized
from aftexport.demo.judging import hold_out
from aftexport.demo.python_source import USES
from aftexport.demo.tasks.multi_label import MultiLabel, best_threshold
from aftexport.demo.tasks.task import f1
from aftexport.demo.tokenizer import train_tokenizer

BYTES = train_tokenizer(["-"], 256)  # a token for each byte
SOURCE = "assert 1\nx = '\N{SNOWMAN}'\nclass A:\n    y: int = 1\n"


def of(*texts: str) -> list[Document]:
    return tokenized(BYTES, Corpus(texts, ("a",) * len(texts)))


def names(document: Document, start: int, stop: int) -> list[str]:
    holds = MultiLabel().target(document).part(start, stop)
    return [name for name, value in zip(USES, holds.tolist(), strict=True) if value]


def test_labels_are_uses_within_part() -> None:
    (document,) = of(SOURCE)
    content = SOURCE.encode()
    middle, end = content.index(b"class"), len(content)
    assert names(document, 0, end) == ["assertions", "classes", "type hints"]
    assert names(document, 0, 1) == ["assertions"]
    assert names(document, 1, middle) == []
    assert names(document, middle, middle + 1) == ["classes"]
    assert names(document, middle + 1, end) == ["type hints"]


def test_document_without_uses_has_no_labels() -> None:
    (document,) = of("x = 1\n")
    assert names(document, 0, len(document)) == []


def test_results_compare_with_baselines() -> None:
    train = of(*[f"assert 1\nx = {i}\n" for i in range(9)], "class A: pass\n")
    held_out = hold_out(of("assert 1\n", "class B: pass\n"), 100)
    index = {name: i for i, name in enumerate(USES)}
    outputs = np.full((2, len(USES)), -1.0, np.float32)
    outputs[0, index["assertions"]] = outputs[1, index["classes"]] = 1.0
    table = MultiLabel().results(train, held_out, list(outputs), "model")
    rows = dict(zip(table.columns[0].cells, table.columns[4].cells, strict=True))
    common = dict(zip(table.columns[0].cells, table.columns[2].cells, strict=True))
    assert rows["classes"] == rows["assertions"] == "1.000"
    assert rows["all labels right"] == "100.0%"
    assert common["assertions"] == "0.667"  # one of two held-out documents
    assert common["all labels right"] == "50.0%"


@pytest.mark.parametrize(
    ("answers", "truth", "expected"),
    [([1, 1, 0], [1, 0, 1], 0.5), ([0, 0], [0, 0], 0.0), ([1, 0, 1], [1, 0, 1], 1.0)],
)
def test_f1_is_harmonic_mean(answers: list[int], truth: list[int], expected: float) -> None:
    assert f1(np.array(answers, bool), np.array(truth, bool)) == pytest.approx(expected)


def test_answer_is_compared_with_truth() -> None:
    (document,) = of("assert 1\n")
    head = {"labels": ["classes"], "scores": dict.fromkeys(USES, 0.25)}
    spans = [{"text": "a\n b" * 40, "contribution": 1.5}, {"text": "[b]", "contribution": -0.5}]
    evidence = {"name": "classes", "spans": spans}
    answer = {"heads": {"logits": head}, "evidence": evidence}
    rows = list(MultiLabel().answer_rows(answer, document))
    texts = dict(rows)
    assert "wrong" in texts["classes"]
    assert "wrong" in texts["assertions"]
    assert "right" in texts["lambdas"]
    shown = [text for name, text in rows if name == "evidence for classes"]
    assert shown[0].startswith("+1.50 a b")
    assert shown[0].endswith("...")
    assert shown[1] == r"-0.50 \[b]"


def test_best_threshold_has_highest_f1() -> None:
    truth = np.array([False, True, False, True, True])
    assert best_threshold(np.array([0.1, 0.2, 0.3, 0.4, 0.5]), truth) == pytest.approx(0.15)
    assert best_threshold(np.array([0.1, 0.9, 0.3, 0.4, 0.8]), truth) == pytest.approx(0.35)
    assert best_threshold(np.array([0.2, 0.8]), np.array([False, False])) == 0.5


def test_tuned_thresholds_are_of_the_head() -> None:
    documents = of("assert 1\n", "x = 1\n")
    outputs = [np.full(len(USES), value, np.float32) for value in (-1.0, -3.0)]
    task = MultiLabel().tuned(documents, outputs)
    threshold = task.head.thresholds[USES.index("assertions")]
    low, high = (1 / (1 + np.exp(x)) for x in (3, 1))
    assert low < threshold < high
    assert task.head.answer(np.full(len(USES), -1.0)).labels == ("assertions",)
