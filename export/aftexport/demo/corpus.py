"""Labeled documents, by default source files of installed packages.

The task is to find the Python package of a source file. The project needs these
packages, so nothing is downloaded. A file that names its package reveals the
answer. So the names of packages, the usual import aliases (np, nx) and the leading
comments (licenses, authors) are removed. A user's documents come from a CSV or JSON Lines file.
"""

import csv
import importlib.machinery
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from aftexport.errors import AftexportError

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


@dataclass(frozen=True)
class Document:
    """A document and its tokens."""

    text: str
    label: str
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of at most ``vocab_size`` tokens, including the 256 bytes, on ``texts``."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenized(tokenizer: Tokenizer, corpus: Corpus) -> list[Document]:
    """Return the documents of a corpus with their tokens."""
    encoded = tokenizer.encode_batch(list(corpus.texts))
    return [
        Document(text, label, tokens.ids)
        for text, label, tokens in zip(corpus.texts, corpus.labels, encoded, strict=True)
    ]


_FIELD_LIMIT = 2**31 - 1

Row = tuple[int, Any, Any]
"""The first line of a row, its text and its label."""


class DocumentsError(AftexportError):
    """A file of labeled documents is invalid."""

    def __init__(self, path: Path, reason: str, remedy: str, line: int | None = None) -> None:
        place = f"{path}, line {line}" if line is not None else str(path)
        super().__init__(f"{place}: {reason}.", remedy)
        self.path = path
        self.reason = reason
        self.line = line


def read_documents(path: Path) -> Corpus:
    """Read documents with their labels."""
    reader = {".csv": _csv_rows, ".jsonl": _json_rows}.get(path.suffix.lower())
    if reader is None:
        raise DocumentsError(
            path,
            f"expected a name with .csv or .jsonl, got {path.suffix or 'no suffix'}",
            "Convert or rename the file.",
        )
    texts, labels = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, text, label in reader(path, file):
                texts.append(_checked(path, line, "text", text))
                labels.append(_checked(path, line, "label", label).strip())
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror})"
        raise DocumentsError(path, reason, "Check the path.") from error
    except UnicodeDecodeError as error:
        reason = f"expected UTF-8, got the byte {error.object[error.start]:#04x}"
        raise DocumentsError(path, reason, "Convert the file to UTF-8.") from error
    if not texts:
        raise DocumentsError(
            path, "the file has no documents", "Give documents of at least two labels."
        )
    return Corpus(tuple(texts), tuple(labels))


def _checked(path: Path, line: int, name: str, value: Any) -> str:
    if value is None:
        raise DocumentsError(path, f"there is no {name}", "Give each row text and label.", line)
    if not isinstance(value, str):
        reason = f"{name} must be a string, got {type(value).__name__}"
        raise DocumentsError(path, reason, f"Put the {name} in quotes.", line)
    if not value.strip():
        raise DocumentsError(path, f"{name} is empty", "Fill it in, or remove the row.", line)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        reason = f"{name} has half a surrogate pair, which is not a character"
        raise DocumentsError(path, reason, "Remove the escape sequence.", line) from error
    return value


def _csv_rows(path: Path, file: TextIO) -> Iterator[Row]:
    previous = csv.field_size_limit(_FIELD_LIMIT)  # the default is too small for long documents
    reader, line = csv.reader(file, strict=True), 1
    try:
        columns = next(reader, [])
        if missing := [name for name in ("text", "label") if name not in columns]:
            raise DocumentsError(
                path,
                f"there is no column {' and no column '.join(missing)}",
                "Name the columns text and label in the first line.",
                line,
            )
        line = reader.line_num + 1
        for values in reader:
            if len(values) > len(columns):
                reason = f"expected {len(columns)} values, got {len(values)}"
                raise DocumentsError(path, reason, "Put texts with commas in quotes.", line)
            if values:  # not a blank line
                row = dict(zip(columns, values, strict=False))
                yield line, row.get("text"), row.get("label")
            line = reader.line_num + 1
    except csv.Error as error:
        raise DocumentsError(path, f"invalid CSV ({error})", "Check the quotes.", line) from error
    finally:
        csv.field_size_limit(previous)


def _json_rows(path: Path, file: TextIO) -> Iterator[Row]:
    for line, content in enumerate(file, 1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DocumentsError(
                path, f"invalid JSON ({error})", "Write one object per line.", line
            ) from error
        if not isinstance(row, dict):
            raise DocumentsError(
                path,
                f"expected a JSON object, got {type(row).__name__}",
                'Write {"text": "...", "label": "..."}.',
                line,
            )
        yield line, row.get("text"), row.get("label")
