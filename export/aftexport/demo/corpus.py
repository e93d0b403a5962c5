"""Labeled documents, by default source files of installed packages.

The task is to find the Python package of a source file. The project needs these
packages, so nothing is downloaded. A file that names its package reveals the
answer. So the names of packages, the usual import aliases (np, nx) and the leading
comments (licenses, authors) are removed.
"""

import importlib.machinery
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PACKAGES: dict[str, tuple[str, ...]] = {
    "networkx": ("networkx", "nx"),
    "numpy": ("numpy", "np", "npt"),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime", "ort"),
    "onnxscript": ("onnxscript",),
    "pip": ("pip",),
    "scipy": ("scipy",),
    "setuptools": ("setuptools",),
    "sklearn": ("scikit-learn", "scikit_learn", "sklearn"),
    "sympy": ("sympy",),
    "torch": ("torch",),
}
"""The words that reveal each package, by import name."""

STANDARD_LIBRARY = "stdlib"

# Folders of other projects' code within a package, and optional folders of Python.
_FOREIGN = {"_vendor", "_vendored", "_external", "externals", "extern", "third_party"}
_OPTIONAL = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}

_BYTES = range(1_000, 60_000)
_HIDDEN = "package"


@dataclass(frozen=True)
class Corpus:
    """Documents with their labels."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def classes(self) -> list[str]:
        """The distinct labels, sorted."""
        return sorted(set(self.labels))

    def take(self, indices: Sequence[int]) -> "Corpus":
        """Return the documents at ``indices``, in that order."""
        return Corpus(tuple(self.texts[i] for i in indices), tuple(self.labels[i] for i in indices))


def cap(labels: Sequence[str], per_class: int, seed: int) -> list[int]:
    """Draw at most ``per_class`` documents of each label; return their indices, sorted."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(labels))
    taken: dict[str, int] = {}
    kept = []
    for index in order.tolist():
        label = labels[index]
        if taken.get(label, 0) < per_class:
            taken[label] = taken.get(label, 0) + 1
            kept.append(index)
    return sorted(kept)


def hide_names(source: str) -> str:
    """Return source code without leading comments, with the words of ``PACKAGES`` replaced."""
    return _NAMES.sub(_HIDDEN, _LEADING_COMMENTS.sub("", source))


def installed_packages(*, num_classes: int, per_class: int, seed: int) -> Corpus:
    """Collect source files of the packages with the most files on this machine."""
    candidates = _source_files()
    largest = sorted(candidates, key=lambda label: (-len(candidates[label]), label))[:num_classes]
    files = [(label, path) for label in sorted(largest) for path in candidates[label]]
    kept = cap([label for label, _ in files], per_class, seed)
    texts, labels = [], []
    for label, path in (files[i] for i in kept):
        try:
            text = hide_names(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            texts.append(text)
            labels.append(label)
    return Corpus(tuple(texts), tuple(labels))


def _source_files() -> dict[str, list[Path]]:
    library = Path(sysconfig.get_path("stdlib"))
    files = {STANDARD_LIBRARY: _python_files(library, skip=_FOREIGN | _OPTIONAL)}
    for name in PACKAGES:
        # Not importlib.util: for pip, setuptools' finder would replace a distutils in use.
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            files[name] = _python_files(Path(spec.submodule_search_locations[0]), skip=_FOREIGN)
    return files


def _python_files(root: Path, skip: set[str]) -> list[Path]:
    return sorted(
        path
        for path in root.rglob("*.py")
        if not skip.intersection(path.relative_to(root).parts) and path.stat().st_size in _BYTES
    )


def _pattern(name: str) -> str:
    # Short names also occur within words, such as pip in pipeline and np in input.
    return rf"(?<![^\W_]){name}(?![^\W_])" if len(name) <= 3 else re.escape(name)


_LEADING_COMMENTS = re.compile(r"\A(?:[ \t]*(?:#.*)?\r?\n)+")
_NAMES = re.compile(
    "|".join(
        _pattern(name)
        for name in sorted((n for names in PACKAGES.values() for n in names), key=len, reverse=True)
    ),
    re.IGNORECASE,
)
