import numpy as np

from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import Document, tokenized
from aftexport.demo.judging import hold_out
from aftexport.demo.python_source import KINDS
from aftexport.demo.tasks.token_classification import TokenKinds, kinds_of, usual_kinds
from aftexport.demo.tokenizer import train_tokenizer

BYTES = train_tokenizer(["-"], 256)  # a token for each byte
WORDS = train_tokenizer(["return x = 12 # return"] * 50, 280)
SOURCE = "x = '\N{SNOWMAN}'\n  # a\n"


def of(*texts: str, words: bool = False) -> list[Document]:
    return tokenized(WORDS if words else BYTES, Corpus(texts, ("a",) * len(texts)))


def names(document: Document) -> list[str]:
    return [KINDS[kind] for kind in kinds_of(document)]


def test_bytes_have_kind_of_their_token() -> None:
    (document,) = of("x\n" + SOURCE.splitlines()[0])
    assert names(document) == ["name", "O", "name", "O", "operator", "O", *["string"] * 5]


def test_token_has_kind_of_first_character_inside() -> None:
    """The space before a word belongs to its token."""
    (document,) = of("if x:\n    return\n", words=True)
    index = document.ids.index(WORDS.token_to_id("\u0120return"))
    assert names(document)[index] == "keyword"
    assert names(document)[-1] == "O"


def test_source_without_tokens_is_outside() -> None:
    (document,) = of("\n \n")
    assert set(names(document)) == {"O"}


def test_target_of_part_is_slice() -> None:
    (document,) = of(SOURCE)
    part = TokenKinds().target(document).part(4, 9)
    assert [KINDS[kind] for kind in part] == ["string"] * 5


def test_usual_kind_is_most_common_of_token() -> None:
    """A token that no document has gets the most common kind."""
    usual, common = usual_kinds(of("x = 1\n# x\nx\nx\n", "long_name = other_name\n"), 256)
    assert KINDS[common] == "name"
    ids = {letter: BYTES.token_to_id(letter) for letter in "x#=z"}
    kinds = {letter: KINDS[usual[token]] for letter, token in ids.items()}
    assert kinds == {"x": "name", "#": "comment", "=": "operator", "z": "name"}


def test_results_compare_with_baselines() -> None:
    held_out = hold_out(of("x = '# x'\n"), 100)
    truth = kinds_of(held_out.documents[0])
    outputs = [np.eye(len(KINDS), dtype=np.float32)[truth]]
    table = TokenKinds().results(of("x = 1\n# x\nx\n"), held_out, outputs, "model")
    rows = dict(zip(table.columns[0].cells, table.columns[4].cells, strict=True))
    by_token = dict(zip(table.columns[0].cells, table.columns[3].cells, strict=True))
    assert rows["string"] == rows["name"] == "1.000"
    assert rows["accuracy without O"] == "100.0%"
    assert by_token["string"] == "0.000"
    assert by_token["operator"] == "1.000"


def test_answer_is_compared_with_truth() -> None:
    (document,) = of("x = 12\n")
    span = {"label": "number", "score": 0.75, "start_token": 4, "end_token": 6}
    labels = ["name", "O", "name", "O", "number", "number", "name"]
    answer = {"heads": {"logits": {"labels": labels, "spans": [span]}}}
    rows = list(TokenKinds().answer_rows(answer, document))
    assert rows[0] == ("right", "75.0% of tokens without O")
    assert ("number", "0.750 12") in rows
