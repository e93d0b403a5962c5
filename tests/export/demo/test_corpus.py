import sys
from types import ModuleType

import pytest

from aftexport.demo.corpus import PACKAGES, cap, hide_names, installed_packages


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
