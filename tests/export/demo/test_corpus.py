import csv
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from aftexport.demo.corpus import (
    PACKAGES,
    Corpus,
    DocumentsError,
    cap,
    hide_names,
    installed_packages,
    read_documents,
    tokenized,
    train_tokenizer,
)


def test_names_aliases_and_comments_are_removed() -> None:
    source = (
        "#!/usr/bin/env python\n# Copyright SciPy developers\n\nimport numpy as np\n"
        "from sklearn.base import x  # as in NumPy\nPyTorch = np.pi\n"
    )
    assert hide_names(source) == (
        "import package as package\nfrom package.base import x  # as in package\n"
        "Pypackage = package.pi\n"
    )


def test_short_names_stay_inside_words() -> None:
    source = "input, pipeline, np_like, sort, _nx\n"
    assert hide_names(source) == "input, pipeline, package_like, sort, _package\n"


def test_source_of_comments_is_empty() -> None:
    assert hide_names("# one\n\n# two\n") == ""


def test_installed_packages_give_anonymous_corpus() -> None:
    """The corpus names none of the packages that it comes from."""
    corpus = installed_packages(num_classes=3, per_class=20, seed=0)
    assert len(corpus.classes) == 3
    assert len(corpus) <= 60
    assert min(corpus.labels.count(label) for label in corpus.classes) >= 15
    long_names = [name for names in PACKAGES.values() for name in names if len(name) > 3]
    everything = "\n".join(corpus.texts).lower()
    assert [name for name in long_names if name in everything] == []


def test_seed_determines_drawn_files() -> None:
    first, again, other = (
        installed_packages(num_classes=2, per_class=10, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert first.texts != other.texts


def test_distutils_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """setuptools' finder would replace it with a warning, since pip is among the packages."""
    used = ModuleType("distutils")
    monkeypatch.setitem(sys.modules, "distutils", used)
    assert installed_packages(num_classes=2, per_class=2, seed=0).texts
    assert sys.modules["distutils"] is used


def test_labels_keep_at_most_their_share() -> None:
    labels = ["a"] * 50 + ["b"] * 3
    kept = cap(labels, 5, seed=0)
    assert kept == sorted(kept)
    assert [labels[i] for i in kept] == ["a"] * 5 + ["b"] * 3


TEXTS = ("def one(x):\n    return x\n" * 20, "class Two:\n\tvalue = 'zwei'\n" * 20)


def test_text_survives_round_trip() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    texts = (*TEXTS, "never seen: \N{SNOWMAN}\x00\r\n  end", " leading")
    for document in tokenized(tokenizer, Corpus(texts, ("a",) * 4)):
        assert tokenizer.decode(document.ids) == document.text


def test_frequent_words_become_one_token() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    assert tokenizer.get_vocab_size() <= 300
    (document,) = tokenized(tokenizer, Corpus((" return",), ("a",)))
    assert len(document) == len(document.ids) == 1


def test_same_texts_give_same_tokenizer() -> None:
    assert train_tokenizer(TEXTS, 300).to_str() == train_tokenizer(TEXTS, 300).to_str()


ROWS = [('a, "quoted"\nline', "one"), ("zwei \N{SNOWMAN}", "two")]


def test_csv_gives_texts_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(
            [("id", "text", "label"), *((i, *row) for i, row in enumerate(ROWS))]
        )
    corpus = read_documents(path)
    assert list(zip(corpus.texts, corpus.labels, strict=True)) == ROWS


def test_jsonl_gives_texts_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "own.JSONL"
    lines = [json.dumps({"text": text, "label": label, "id": 1}) for text, label in ROWS]
    path.write_text("\n\n".join(lines) + "\n", "utf-8")
    corpus = read_documents(path)
    assert list(zip(corpus.texts, corpus.labels, strict=True)) == ROWS


def test_csv_takes_documents_over_field_limit(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(f"text,label\n{'word ' * 40_000},long\n", "utf-8")
    before = csv.field_size_limit()
    assert len(read_documents(path).texts[0]) == 200_000
    assert csv.field_size_limit() == before


BAD_FILES = {
    "no_label_column.csv": ("text,class\na,b\n", 1, "no column label"),
    "no_columns.csv": ("a,b\nc,d\n", 1, "no column text and no column label"),
    "empty.csv": ("", 1, "no column text"),
    "no_rows.csv": ("text,label\n", None, "no documents"),
    "short_row.csv": ("text,label\na,b\nc\n", 3, "no label"),
    "long_row.csv": ("text,label\na,b\nc,d,e\n", 3, "expected 2 values, got 3"),
    "blank_text.csv": ('text,label\na,b\n"  ",b\n', 3, "text is empty"),
    "blank_label.csv": ("text,label\na,\n", 2, "label is empty"),
    "open_quote.csv": ('text,label\n\n"a\na",b\n"c,d\ne,f\n', 5, "invalid CSV"),
    "not_json.jsonl": ('{"text": "a", "label": "b"}\n{"text": \n', 2, "invalid JSON"),
    "deep.jsonl": ("[" * 100_000 + "\n", 1, "invalid JSON"),
    "list.jsonl": ('["a", "b"]\n', 1, "expected a JSON object, got list"),
    "no_text.jsonl": ('\n{"label": "b"}\n', 2, "no text"),
    "null_label.jsonl": ('{"text": "a", "label": null}\n', 1, "no label"),
    "number_label.jsonl": ('{"text": "a", "label": 3}\n', 1, "label must be a string, got int"),
    "surrogate.jsonl": ('{"text": "\\ud800", "label": "b"}\n', 1, "half a surrogate pair"),
    "empty.jsonl": ("", None, "no documents"),
    "documents.txt": ("text,label\na,b\n", None, "expected a name with .csv or .jsonl, got .txt"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_line_error_has_remedy(name: str, tmp_path: Path) -> None:
    """The error also names the line."""
    content, line, reason = BAD_FILES[name]
    path = tmp_path / name
    path.write_text(content, "utf-8")
    with pytest.raises(DocumentsError) as caught:
        read_documents(path)
    assert caught.value.line == line
    assert reason in caught.value.reason
    assert str(path) in caught.value.problem
    assert line is None or f"line {line}" in caught.value.problem
    assert caught.value.remedy.endswith(".")


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("text,label\ncaf\N{LATIN SMALL LETTER E WITH ACUTE},b\n".encode("latin-1"))
    with pytest.raises(DocumentsError, match="expected UTF-8, got the byte 0xe9"):
        read_documents(path)


@pytest.mark.parametrize("name", ["missing.csv", "folder.csv"])
def test_unreadable_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DocumentsError, match="cannot be read"):
        read_documents(tmp_path / name)
