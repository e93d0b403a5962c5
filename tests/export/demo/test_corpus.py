from aftexport.demo.corpus import PACKAGES, cap, hide_names, installed_packages


def test_names_aliases_and_leading_comments_are_taken_out() -> None:
    source = (
        "#!/usr/bin/env python\n# Copyright SciPy developers\n\nimport numpy as np\n"
        "from sklearn.base import x  # as in NumPy\nPyTorch = np.pi\n"
    )
    assert hide_names(source) == (
        "import package as package\nfrom package.base import x  # as in package\n"
        "Pypackage = package.pi\n"
    )


def test_short_names_stay_where_they_are_part_of_a_word() -> None:
    source = "input, pipeline, np_like, sort, _nx\n"
    assert hide_names(source) == "input, pipeline, package_like, sort, _package\n"


def test_a_source_of_comments_alone_is_empty() -> None:
    assert hide_names("# one\n\n# two\n") == ""


def test_the_packages_installed_give_a_corpus_that_names_none_of_them() -> None:
    corpus = installed_packages(num_classes=3, per_class=20, seed=0)
    assert len(corpus.classes) == 3
    assert len(corpus) <= 60
    assert min(corpus.labels.count(label) for label in corpus.classes) >= 15
    long_names = [name for names in PACKAGES.values() for name in names if len(name) > 3]
    everything = "\n".join(corpus.texts).lower()
    assert [name for name in long_names if name in everything] == []


def test_the_same_seed_draws_the_same_files_and_another_seed_others() -> None:
    first, again, other = (
        installed_packages(num_classes=2, per_class=10, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert first.texts != other.texts


def test_no_label_keeps_more_than_its_share() -> None:
    labels = ["a"] * 50 + ["b"] * 3
    kept = cap(labels, 5, seed=0)
    assert kept == sorted(kept)
    assert [labels[i] for i in kept] == ["a"] * 5 + ["b"] * 3
