"""A task of the demo: its documents, the truth about them, its baselines and its tables."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from aftexport.demo.corpus import Corpus, installed_packages
from aftexport.demo.documents import Document, Target
from aftexport.demo.judging import HeldOut
from aftexport.demo.options import DemoOptions
from aftexport.demo.python_source import is_readable
from aftexport.demo.split import Split
from aftexport.demo.training import Crops
from aftexport.heads import Head
from aftexport.system.console import escape, plain_table, stage

Outputs = Sequence[NDArray[np.float32]]
"""The output of a model for each document."""

_PER_CLASS = 100
_SHOWN = 60


class Task(ABC):
    """A task, for the training documents of one run.

    Attributes:
        problem_type: the task by its name in ``aftexport.heads``.
        evidence: number of passages of evidence to ask the server for.
        steps: number of optimizer steps.
        crops: the parts of documents in a step of the training.
        window: the window of the mechanisms with one.
        tuned_on: maximum number of training documents for ``tuned``.
        names: the names of the labels or values.
    """

    problem_type: ClassVar[str]
    evidence: ClassVar[int] = 0
    steps: ClassVar[int] = 200
    crops: ClassVar[Crops] = Crops()
    window: ClassVar[int] = 8
    tuned_on: ClassVar[int] = 0
    names: tuple[str, ...]

    @classmethod
    @abstractmethod
    def collect(cls, options: DemoOptions, console: Console) -> Corpus:
        """Return the documents; their labels are balanced in the split."""

    @classmethod
    @abstractmethod
    def of(cls, train: Corpus) -> Self:
        """Return the task for training documents."""

    @abstractmethod
    def show_split(self, parts: Split, console: Console) -> None:
        """Print the labels or values of both parts of the documents."""

    @abstractmethod
    def target(self, document: Document) -> Target:
        """Return the truth about a document."""

    def tuned(self, documents: Sequence[Document], outputs: Outputs) -> Self:
        """Return the task with settings for the outputs of the model for training documents."""
        return self

    @abstractmethod
    def results(
        self, train: Sequence[Document], held_out: HeldOut, outputs: Outputs, name: str
    ) -> Table:
        """Return the table of the model's results beside those of baselines.

        Args:
            train: the training documents.
            held_out: the documents of the outputs.
            outputs: the outputs of the model.
            name: the name of the model.
        """

    @abstractmethod
    def answer_rows(self, answer: dict[str, Any], document: Document) -> Iterator[tuple[str, str]]:
        """Yield the server's answer for a document beside the truth, as names and texts."""

    @property
    def head(self) -> Head | None:
        """The head of the model; None for one with the usual settings."""
        return None


def source_files(options: DemoOptions, console: Console) -> Corpus:
    """Return Python source files of installed packages, unchanged, that this Python can read."""
    with stage(console, "Collecting source files of installed packages"):
        return installed_packages(
            num_classes=options.size.classes,
            per_class=options.size.per_class or _PER_CLASS,
            seed=options.seed,
            prepare=lambda text: text if is_readable(text) else "",
        )


def show_counts(parts: Split, console: Console) -> None:
    """Print the number of documents, and of groups of near-duplicates."""
    total = len(parts.train) + len(parts.test)
    console.print(
        f"{total} documents, {len(parts.test)} of them held out; {parts.groups} if "
        "near-duplicates count once."
    )


def numbers_table(*columns: str) -> Table:
    """Return an empty table with a column of names and columns of numbers."""
    table = plain_table(*columns)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def f1(answers: NDArray[np.bool_], truth: NDArray[np.bool_]) -> float:
    """Return the harmonic mean of precision and recall; 0 without a right answer."""
    both = int((answers & truth).sum())
    return 2 * both / max(1, int(answers.sum()) + int(truth.sum()))


def evidence_rows(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the passages of evidence of an answer."""
    evidence = answer.get("evidence")
    if evidence is None:
        return
    for span in evidence["spans"]:
        name = f"evidence for {evidence['name']}" if evidence.get("name") else "evidence"
        yield name, f"{span['contribution']:+.2f} {excerpt(span['text'])}"


def excerpt(text: str) -> str:
    """Return the beginning of a text for a console, in one line."""
    line = " ".join(text.split())
    return escape(line if len(line) <= _SHOWN else f"{line[:_SHOWN]} ...")
