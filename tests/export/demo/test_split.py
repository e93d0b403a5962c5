import random

import pytest

from aftexport.demo.corpus import Corpus
from aftexport.demo.split import near_duplicates, shingles, split
from aftexport.errors import UsageError


def document(seed: int, lines: int = 40) -> str:
    words = random.Random(seed)
    return "\n".join(
        " ".join(f"word{words.randrange(5000)}" for _ in range(6)) for _ in range(lines)
    )


def with_changed_lines(text: str, every: int) -> str:
    return "\n".join(
        f"changed {i}" if i % every == 0 else line for i, line in enumerate(text.splitlines())
    )


def corpus_with_copies() -> Corpus:
    """Return two labels; documents 0 and 1 of each six differ only in some lines."""
    texts, labels = [], []
    for seed in range(60):
        original = document(seed)
        copies = [original, with_changed_lines(original, 10)] if seed % 5 == 0 else [original]
        texts += copies
        labels += [("even", "odd")[seed % 2]] * len(copies)
    return Corpus(tuple(texts), tuple(labels))


def test_copy_with_changed_lines_is_duplicate() -> None:
    original = document(0)
    groups = near_duplicates([original, document(1), with_changed_lines(original, 10)])
    assert groups[0] == groups[2] != groups[1]


def test_near_duplicates_link_in_chains() -> None:
    lines = document(0, 80).splitlines()
    overlapping = ["\n".join(lines[start : start + 40]) for start in (0, 20, 40)]
    assert len(set(near_duplicates(overlapping).tolist())) == 1
    first, last = overlapping[0], overlapping[2]
    assert len(set(near_duplicates([first, last]).tolist())) == 2


def test_a_common_license_makes_no_duplicates() -> None:
    license = document(99, 8)
    groups = near_duplicates([f"{license}\n{document(seed, 60)}" for seed in range(5)])
    assert len(set(groups.tolist())) == 5


def test_long_lines_are_compared_by_words() -> None:
    words = document(0).split()
    first, second = " ".join(words), " ".join([*words[:100], "other", *words[101:]])
    groups = near_duplicates([first, second, document(1).replace("\n", " ")])
    assert groups[0] == groups[1] != groups[2]


def test_identical_short_texts_are_duplicates() -> None:
    groups = near_duplicates(["thank you", "thank you", "no"])
    assert groups[0] == groups[1] != groups[2]


def test_every_text_has_a_shingle() -> None:
    assert list(shingles("one")) == ["one"]


@pytest.mark.parametrize("seed", range(5))
def test_near_duplicates_stay_on_one_side(seed: int) -> None:
    corpus = corpus_with_copies()
    parts = split(corpus, seed)
    assert sorted(parts.train.texts + parts.test.texts) == sorted(corpus.texts)
    assert parts.groups == 60
    assert len(parts.test) == pytest.approx(72 / 5, abs=2)
    assert parts.test.labels.count("odd") == pytest.approx(36 / 5, abs=2)
    both = near_duplicates(parts.train.texts + parts.test.texts).tolist()
    assert not set(both[: len(parts.train)]) & set(both[len(parts.train) :])


def test_seed_determines_split() -> None:
    corpus = corpus_with_copies()
    assert split(corpus, 0) == split(corpus, 0)
    assert split(corpus, 0) != split(corpus, 1)


def test_one_label_is_refused() -> None:
    with pytest.raises(UsageError, match="at least two labels"):
        split(Corpus(("one", "two"), ("a", "a")), 0)


def test_label_with_few_documents_is_refused() -> None:
    texts = [document(seed) for seed in range(20)] + [document(100)] * 20
    corpus = Corpus(tuple(texts), ("many",) * 20 + ("copied",) * 20)
    with pytest.raises(UsageError, match=r"at least 5 distinct .* 'copied', got 1"):
        split(corpus, 0)
