import numpy as np
import pytest

from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import Document, tokenized
from aftexport.demo.judging import hold_out
from aftexport.demo.tasks.regression import ProseShare, r_squared
from aftexport.demo.tokenizer import train_tokenizer

BYTES = train_tokenizer(["-"], 256)  # a token for each byte
SOURCE = "# comment\n\nx = 1\ny = '\N{SNOWMAN}'\n# another\n"
PLAIN = ProseShare(offset=0.0, scale=1.0)


def of(*texts: str) -> list[Document]:
    return tokenized(BYTES, Corpus(texts, ("a",) * len(texts)))


def test_value_is_share_of_lines() -> None:
    (document,) = of(SOURCE)
    part = PLAIN.target(document).part
    middle, end = SOURCE.index("x"), len(document)
    assert part(0, end).tolist() == [50.0]
    assert part(0, middle).tolist() == [100.0]
    assert part(1, middle + 1).tolist() == [0.0]  # the comment begins before the part
    assert part(middle, end).tolist() == pytest.approx([100 / 3])
    assert part(1, 2).tolist() == [0.0]


def test_targets_are_standardized_and_scaled_back() -> None:
    """The head's scale and offset turn targets back into percent."""
    texts = ("# a\n", "x = 1\n", SOURCE)
    task = ProseShare.of(Corpus(texts, ("a",) * 3))
    targets = np.array([task.target(d).part(0, len(d)).numpy() for d in of(*texts)], float)
    assert targets.mean() == pytest.approx(0, abs=1e-6)
    assert targets.std() == pytest.approx(1, abs=1e-6)
    assert task.head.scores(targets)[:, 0] == pytest.approx([100, 0, 50], abs=1e-4)


def test_results_compare_with_baselines() -> None:
    train = of(*["# a\n" * n + "x = 1\n" * (9 - n) for n in range(9)])
    held_out = hold_out(of("# a\n", "x = 1\n", SOURCE), 100)
    outputs = [np.array([value], np.float32) for value in (100.0, 0.0, 50.0)]
    table = PLAIN.results(train, held_out, outputs, "model")
    _, scores, errors = (list(column.cells) for column in table.columns)
    assert (scores[2], errors[2]) == ("1.000", "0.0 percent")
    assert float(scores[0]) <= 0 < float(scores[1])


def test_r_squared_of_mean_is_zero() -> None:
    truth = np.array([1.0, 2.0, 6.0])
    assert r_squared(np.full(3, 3.0), truth) == pytest.approx(0)
    assert r_squared(truth, truth) == 1


def test_answer_is_compared_with_truth() -> None:
    (document,) = of(SOURCE)
    answer = {"heads": {"logits": {"values": {"prose": 41.26}}}}
    ((name, text),) = PLAIN.answer_rows(answer, document)
    assert name == "prose"
    assert "41.3 percent" in text
    assert "50.0" in text
