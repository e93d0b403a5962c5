import numpy as np
import pytest

from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import Document, tokenized
from aftexport.demo.judging import hold_out
from aftexport.demo.python_source import USES
from aftexport.demo.tasks.multi_label import MultiLabel
from aftexport.demo.tasks.task import f1
from aftexport.demo.tokenizer import train_tokenizer

BYTES = train_tokenizer(["-"], 256)  # a token for each byte
SOURCE = "import re\nx = '\N{SNOWMAN}'\nclass A:\n    y: int = 1\n"


def of(*texts: str) -> list[Document]:
    return tokenized(BYTES, Corpus(texts, ("a",) * len(texts)))


def names(document: Document, start: int, stop: int) -> list[str]:
    holds = MultiLabel().target(document).part(start, stop)
    return [name for name, value in zip(USES, holds.tolist(), strict=True) if value]


def test_labels_are_uses_within_part() -> None:
    (document,) = of(SOURCE)
    content = SOURCE.encode()
    middle, end = content.index(b"class"), len(content)
    assert names(document, 0, end) == ["classes", "regular expressions", "type hints"]
    assert names(document, 0, 1) == ["regular expressions"]
    assert names(document, 1, middle) == []
    assert names(document, middle, middle + 1) == ["classes"]
    assert names(document, middle + 1, end) == ["type hints"]


def test_document_without_uses_has_no_labels() -> None:
    (document,) = of("x = 1\n")
    assert names(document, 0, len(document)) == []


def test_results_compare_with_baselines() -> None:
    train = of(*[f"import re\nx = {i}\n" for i in range(9)], "class A: pass\n")
    held_out = hold_out(of("import re\n", "class B: pass\n"), 100)
    index = {name: i for i, name in enumerate(USES)}
    outputs = np.full((2, len(USES)), -1.0, np.float32)
    outputs[0, index["regular expressions"]] = outputs[1, index["classes"]] = 1.0
    table = MultiLabel().results(train, held_out, list(outputs), "model")
    rows = dict(zip(table.columns[0].cells, table.columns[4].cells, strict=True))
    common = dict(zip(table.columns[0].cells, table.columns[2].cells, strict=True))
    assert rows["classes"] == rows["regular expressions"] == "1.000"
    assert rows["all labels right"] == "100.0%"
    assert common["regular expressions"] == "0.667"  # one of two held-out documents
    assert common["all labels right"] == "50.0%"


@pytest.mark.parametrize(
    ("answers", "truth", "expected"),
    [([1, 1, 0], [1, 0, 1], 0.5), ([0, 0], [0, 0], 0.0), ([1, 0, 1], [1, 0, 1], 1.0)],
)
def test_f1_is_harmonic_mean(answers: list[int], truth: list[int], expected: float) -> None:
    assert f1(np.array(answers, bool), np.array(truth, bool)) == pytest.approx(expected)


def test_answer_is_compared_with_truth() -> None:
    (document,) = of("import re\n")
    head = {"labels": ["classes"], "scores": dict.fromkeys(USES, 0.25)}
    spans = [{"text": "a\n b" * 40, "contribution": 1.5}, {"text": "[b]", "contribution": -0.5}]
    evidence = {"name": "classes", "spans": spans}
    answer = {"heads": {"logits": head}, "evidence": evidence}
    rows = list(MultiLabel().answer_rows(answer, document))
    texts = dict(rows)
    assert "wrong" in texts["classes"]
    assert "wrong" in texts["regular expressions"]
    assert "right" in texts["generators"]
    shown = [text for name, text in rows if name == "evidence for classes"]
    assert shown[0].startswith("+1.50 a b")
    assert shown[0].endswith("...")
    assert shown[1] == r"-0.50 \[b]"
