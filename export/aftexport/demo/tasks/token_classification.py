"""The kind of each token of a source file: comment, string, number, name, keyword or operator."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import Document
from aftexport.demo.judging import HeldOut
from aftexport.demo.options import DemoOptions
from aftexport.demo.python_source import KINDS, OUTSIDE, find_tokens
from aftexport.demo.split import Split
from aftexport.demo.tasks.task import (
    Outputs,
    Task,
    excerpt,
    f1,
    numbers_table,
    show_counts,
    source_files,
)

Kinds = NDArray[np.int64]
"""The index in ``KINDS`` of each token, ``[T]``."""

_OUTSIDE = KINDS.index(OUTSIDE)
_SPANS_SHOWN = 2


class _Kinds:
    """The kinds of a document's tokens."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = torch.from_numpy(kinds)

    def part(self, start: int, stop: int) -> Tensor:
        """Return the kind of each token; see ``Target``."""
        return self._kinds[start:stop]


class TokenKinds(Task):
    """The kind of each token, which ``tokenize`` finds."""

    problem_type: ClassVar[str] = "token_classification"
    window: ClassVar[int] = 32  # the quotes of a string are far from its middle
    names = KINDS

    @classmethod
    def collect(cls, options: DemoOptions, console: Console) -> Corpus:
        """Return source files."""
        corpus = source_files(options, console)
        console.print(
            "Task: find the kind of each token. The truth comes from Python's module tokenize. A "
            f"token of the model has the kind of its first character inside a token of Python; "
            f"{OUTSIDE} is outside, such as indentation."
        )
        return corpus

    @classmethod
    def of(cls, train: Corpus) -> Self:
        """Return the task."""
        return cls()

    def show_split(self, parts: Split, console: Console) -> None:
        """Print the number of documents."""
        show_counts(parts, console)

    def target(self, document: Document) -> _Kinds:
        """Return the kinds."""
        return _Kinds(kinds_of(document))

    def results(
        self, train: Sequence[Document], held_out: HeldOut, outputs: Outputs, name: str
    ) -> Table:
        """Return the F1 score of each kind, and the accuracies; see ``Task``."""
        truth = np.concatenate([kinds_of(document) for document in held_out.documents])
        tokens = np.concatenate([document.ids for document in held_out.documents])
        usual, common = usual_kinds(train, int(tokens.max()) + 1)
        answers = {
            "most common": np.full(len(truth), common),
            "by token": usual[tokens],
            f"[bold]{name}[/]": np.concatenate([logits.argmax(1) for logits in outputs]),
        }
        table = numbers_table("kind", "tokens", *(f"F1, {title}" for title in answers))
        counted = truth != _OUTSIDE
        for i, kind in enumerate(KINDS):
            scores = [f1(kinds == i, truth == i) for kinds in answers.values()]
            share = (truth == i).mean()
            table.add_row(kind, f"{share:.1%}", *(f"{score:.3f}" for score in scores))
        table.add_section()
        right = [(kinds == truth)[counted].mean() for kinds in answers.values()]
        table.add_row(f"accuracy without {OUTSIDE}", "", *(f"{x:.1%}" for x in right))
        table.caption = (
            f"{len(truth):,} tokens of {len(held_out.documents)} held-out documents; most common: "
            "always one kind; by token: the most common kind of the same token in training"
        )
        return table

    def answer_rows(self, answer: dict[str, Any], document: Document) -> Iterator[tuple[str, str]]:
        """Yield the share of right tokens, and the longest spans of each kind."""
        (head,) = answer["heads"].values()
        truth = kinds_of(document)
        counted = truth != _OUTSIDE
        kinds = np.array([KINDS.index(label) for label in head["labels"]])
        yield "right", f"{(kinds == truth)[counted].mean():.1%} of tokens without {OUTSIDE}"
        yield "spans", f"{len(head['spans']):,}"
        for kind in KINDS:
            spans = [span for span in head["spans"] if span["label"] == kind]
            longest = sorted(spans, key=lambda span: span["start_token"] - span["end_token"])
            for span in longest[:_SPANS_SHOWN]:
                text = document.excerpt(span["start_token"], span["end_token"])
                yield kind, f"{span['score']:.3f} {excerpt(text)}"


def kinds_of(document: Document) -> Kinds:
    """Return the kind of each token: that of its first byte inside a token of Python."""
    kinds = _kinds_of_bytes(document.text)
    inside = np.flatnonzero(kinds != _OUTSIDE)
    if not len(inside):
        return np.full(len(document), _OUTSIDE)
    ends = np.append(document.starts[1:], len(kinds))
    found = np.searchsorted(inside, document.starts)
    first = inside[np.minimum(found, len(inside) - 1)]
    has_one = (found < len(inside)) & (first < ends)
    return np.where(has_one, kinds[first], _OUTSIDE).astype(np.int64)


@lru_cache(maxsize=4096)
def _kinds_of_bytes(text: str) -> NDArray[np.int8]:
    kinds = np.full(len(text.encode()), _OUTSIDE, np.int8)
    for kind, start, end in find_tokens(text):
        kinds[start:end] = KINDS.index(kind)
    return kinds


def usual_kinds(documents: Sequence[Document], size: int) -> tuple[Kinds, int]:
    """Return the most common kind of each token id, and the most common kind, without ``O``.

    Args:
        documents: the documents to count.
        size: minimum number of token ids. An id without a document has the most common kind.
    """
    counts = np.zeros((max(size, *(max(d.ids) + 1 for d in documents)), len(KINDS)), np.int64)
    for document in documents:
        np.add.at(counts, (np.array(document.ids), kinds_of(document)), 1)
    common = int(np.delete(counts.sum(0), _OUTSIDE).argmax())
    common += common >= _OUTSIDE
    return np.where(counts.any(1), counts.argmax(1), common), common
