"""Labelled documents, and those every machine with this project has.

The task: which Python package does this source file come from? The packages are
there because the project needs them, so nothing is downloaded. A file that names
its package gives the answer away: the packages' names, the usual import aliases
(np, nx) and the leading comments (licences, authors) are taken out.
"""

import importlib.util
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
"""Import name to the words that give the package away."""

STANDARD_LIBRARY = "stdlib"

# Other projects' code, shipped inside a package; and what not every Python has.
_FOREIGN = {"_vendor", "_vendored", "_external", "externals", "extern", "third_party"}
_OPTIONAL = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}

_BYTES = range(1_000, 60_000)
_HIDDEN = "package"


@dataclass(frozen=True)
class Corpus:
    """Documents with their labels.

    Attributes:
        texts: the documents.
        labels: the label of each.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def classes(self) -> list[str]:
        """The distinct labels, sorted."""
        return sorted(set(self.labels))

    def take(self, indices: Sequence[int]) -> "Corpus":
        """The documents at ``indices``, in that order."""
        return Corpus(tuple(self.texts[i] for i in indices), tuple(self.labels[i] for i in indices))


def cap(labels: Sequence[str], per_class: int, seed: int) -> list[int]:
    """Draws at most ``per_class`` documents of each label; returns their indices, sorted."""
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


def installed_packages(*, num_classes: int, per_class: int, seed: int) -> Corpus:
    """Collects source files of the packages with the most files on this machine.

    Args:
        num_classes: packages to take, the standard library being one of the
            candidates; fewer where fewer are installed.
        per_class: most files of one package, drawn at random.
        seed: of the draw.

    Returns:
        The files with the packages' names hidden, labelled by import name.
    """
    found = _source_files()
    largest = sorted(found, key=lambda label: (-len(found[label]), label))[:num_classes]
    files = [(label, path) for label in sorted(largest) for path in found[label]]
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


def hide_names(source: str) -> str:
    """Source code without its leading comments, each name in ``PACKAGES`` replaced by one word."""
    return _NAMES.sub(_HIDDEN, _LEADING_COMMENTS.sub("", source))


def _source_files() -> dict[str, list[Path]]:
    library = Path(sysconfig.get_path("stdlib"))
    found = {STANDARD_LIBRARY: _python_files(library, skip=_FOREIGN | _OPTIONAL)}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found[name] = _python_files(Path(spec.submodule_search_locations[0]), skip=_FOREIGN)
    return found


def _python_files(root: Path, skip: set[str]) -> list[Path]:
    return sorted(
        path
        for path in root.rglob("*.py")
        if not skip.intersection(path.relative_to(root).parts) and path.stat().st_size in _BYTES
    )


def _pattern(name: str) -> str:
    # Short names are also parts of words: pip in pipeline, np in input.
    return rf"(?<![^\W_]){name}(?![^\W_])" if len(name) <= 3 else re.escape(name)


_LEADING_COMMENTS = re.compile(r"\A(?:[ \t]*(?:#.*)?\r?\n)+")
_NAMES = re.compile(
    "|".join(
        _pattern(name)
        for name in sorted((n for names in PACKAGES.values() for n in names), key=len, reverse=True)
    ),
    re.IGNORECASE,
)
