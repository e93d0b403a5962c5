import random
from pathlib import Path

from benchmarks.documents import debian
from benchmarks.documents.texts import (
    Data,
    Text,
    family_of,
    normalized,
    read_texts,
    split_texts,
)

WORDS = [f"word{number}" for number in range(400)]


def test_family_has_no_version() -> None:
    names = ["gpl-2.0-plus", "lgpl-2.1", "mit", "cc0-1.0", "bsd-new", "apache-v2"]
    assert [family_of(name) for name in names] == ["gpl", "lgpl", "mit", "cc0", "bsd-new", "apache"]


def test_texts_have_families_of_expression(wheel: Path) -> None:
    """A generic licence, an exception and a text of one word are left out."""
    found = {text.content[0]: text.families for text in read_texts(wheel)
             if text.content[1] == " "}  # fmt: skip
    assert found == {"b": {"mit", "gpl", "zlib"}, "c": {"gpl"}}


def test_near_copies_are_in_one_part(wheel: Path) -> None:
    parts = split_texts(read_texts(wheel))
    assert all(len(part) > 10 for part in parts.values())
    contents = [{normalized(text.content) for text in part} for part in parts.values()]
    assert sum(map(len, contents)) == len(set.union(*contents))


def test_changed_word_makes_near_copy() -> None:
    words = random.Random(1).choices(WORDS, k=200)
    changed = [*words[:50], "changed", *words[51:]]
    others = [random.Random(n).choices(WORDS, k=200) for n in range(2, 60)]
    texts = [Text(" ".join(own), frozenset()) for own in (words, changed, *others)]
    for seed in range(10):
        parts = split_texts(texts, seed)
        assert any(texts[0] in part and texts[1] in part for part in parts.values())


def test_filler_has_no_family(data: Data) -> None:
    assert data.labels == ["apache", "gpl", "mit"]
    for part in data.parts.values():
        for ids in part.filler:
            words = set(normalized(data.tokenizer.decode(ids.tolist())).split())
            assert not words & set(data.labels)


def test_debian_names_become_families() -> None:
    text = "Format: x\nLicense: GPL-2+ or Artistic, and Expat\n\nLicense: BSD-3-clause\n text\n"
    assert debian.families_of(text) == {"gpl", "artistic", "mit", "bsd-new"}


def test_debian_files_are_labelled(tmp_path: Path, data: Data) -> None:
    """Equal files count once; others than machine-readable ones do not count."""
    texts = ["Format: x\nLicense: GPL-3+ with Bison exception\n"] * 2
    texts += ["License: GPL-2\n", "Format: x\nLicense: unheard-of\n"]
    for number, text in enumerate(texts):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "copyright").write_text(text)
    (only,) = debian.read_files(data.tokenizer, ["gpl", "mit"], tmp_path)
    assert only.target.tolist() == [1, 0]
    assert debian.read_files(data.tokenizer, ["gpl"], tmp_path / "absent") == []
