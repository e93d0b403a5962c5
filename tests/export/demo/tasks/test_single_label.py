import numpy as np
import pytest

from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import tokenized
from aftexport.demo.judging import hold_out
from aftexport.demo.tasks.single_label import SingleLabel, accuracy
from aftexport.demo.tokenizer import train_tokenizer

BYTES = train_tokenizer(["-"], 256)
TASK = SingleLabel(("long", "short"))
DOCUMENTS = tokenized(BYTES, Corpus(("ab", "c" * 20), ("short", "long")))


def test_accuracy_is_share_of_right_answers() -> None:
    assert accuracy(["a", "b", "b"], ["a", "b", "a"]) == pytest.approx(2 / 3)


def test_each_part_has_label_of_document() -> None:
    targets = [TASK.target(document) for document in DOCUMENTS]
    assert [int(target.part(0, 1)) for target in targets] == [1, 0]
    assert int(targets[1].part(5, 20)) == 0


def test_results_compare_with_baselines() -> None:
    train = tokenized(BYTES, Corpus(("ab", "ba", "ccc"), ("short", "short", "long")))
    logits = [np.array([0.0, 1.0], np.float32), np.array([2.0, 1.0], np.float32)]
    table = TASK.results(train, hold_out(DOCUMENTS, 100), logits, "model")
    assert list(table.columns[1].cells)[::2] == ["50.0%", "100.0%"]


def test_answer_is_compared_with_truth() -> None:
    answer = {"label": "long", "scores": {"long": 0.75, "short": 0.25}}
    rows = dict(TASK.answer_rows(answer, DOCUMENTS[0]))
    assert "wrong" in rows["label"]
    assert rows["scores"] == "long 0.750, short 0.250"
    assert "right" in dict(TASK.answer_rows(answer, DOCUMENTS[1]))["label"]
