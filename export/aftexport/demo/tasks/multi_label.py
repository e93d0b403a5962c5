"""The constructs that a source file uses, of which any number holds."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from aftexport.demo.baseline import byte_labels
from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import Document
from aftexport.demo.judging import HeldOut
from aftexport.demo.options import DemoOptions
from aftexport.demo.python_source import USES, find_uses
from aftexport.demo.split import Split
from aftexport.demo.tasks.task import (
    Outputs,
    Task,
    evidence_rows,
    f1,
    numbers_table,
    show_counts,
    source_files,
)
from aftexport.demo.training import Crops
from aftexport.heads.multi_label_classification import (
    DEFAULT_THRESHOLD,
    MultiLabelClassification,
)
from aftexport.system.console import escape


class _Uses:
    """The labels of a document: a label holds for a part if its construct is in it."""

    def __init__(self, document: Document) -> None:
        uses = find_uses(document.text)
        self._tokens = document.tokens_at([place for _, place in uses])
        self._labels = torch.tensor([USES.index(name) for name, _ in uses], dtype=torch.int64)

    def part(self, start: int, stop: int) -> Tensor:
        """Return 1 for each label that holds; see ``Target``."""
        first, end = np.searchsorted(self._tokens, [start, stop])
        holds = torch.zeros(len(USES))
        holds[self._labels[first:end]] = 1
        return holds


class MultiLabel(Task):
    """The constructs in a source file, which ``ast`` finds.

    Args:
        thresholds: for each label the smallest score with which it holds.
    """

    problem_type: ClassVar[str] = "multi_label_classification"
    evidence: ClassVar[int] = 3
    crops: ClassVar[Crops] = Crops(8, 1024, 2048)  # one construct may be far from the next
    tuned_on: ClassVar[int] = 150
    names = USES

    def __init__(self, thresholds: tuple[float, ...] = (DEFAULT_THRESHOLD,) * len(USES)) -> None:
        self._thresholds = thresholds

    @classmethod
    def collect(cls, options: DemoOptions, console: Console) -> Corpus:
        """Return source files."""
        corpus = source_files(options, console)
        console.print(
            "Task: find the constructs that a source file uses anywhere. The truth comes from "
            "Python's module ast."
        )
        return corpus

    @classmethod
    def of(cls, train: Corpus) -> Self:
        """Return the task."""
        return cls()

    @property
    def head(self) -> MultiLabelClassification:
        """The labels with their thresholds."""
        return MultiLabelClassification(labels=USES, thresholds=self._thresholds)

    def tuned(self, documents: Sequence[Document], outputs: Outputs) -> Self:
        """Return the task with the threshold of each label that has the highest F1 score.

        A construct counts less in a whole document than in the crops of the training.
        """
        scores, truth = self._scores(outputs), self._labels(documents)
        return type(self)(tuple(map(best_threshold, scores.T, truth.T)))

    def _scores(self, outputs: Outputs) -> NDArray[np.float64]:
        return self.head.scores(np.stack(outputs).astype(np.float64))

    def show_split(self, parts: Split, console: Console) -> None:
        """Print the number of documents."""
        show_counts(parts, console)

    def target(self, document: Document) -> _Uses:
        """Return the uses."""
        return _Uses(document)

    def _labels(self, documents: Sequence[Document]) -> NDArray[np.bool_]:
        rows = [self.target(document).part(0, len(document)).bool() for document in documents]
        return torch.stack(rows).numpy()

    def results(
        self, train: Sequence[Document], held_out: HeldOut, outputs: Outputs, name: str
    ) -> Table:
        """Return the F1 score of each label; see ``Task``."""
        fitted, truth = self._labels(train), self._labels(held_out.documents)
        texts = [document.text for document in train]
        answers = {
            "most common": np.broadcast_to(fitted.mean(0) >= 0.5, truth.shape),
            "bytes": byte_labels(texts, fitted, held_out.texts),
            f"[bold]{name}[/]": self._scores(outputs) >= np.array(self._thresholds),
        }
        table = numbers_table("label", "documents", *(f"F1, {title}" for title in answers))
        for i, label in enumerate(self.names):
            scores = [f1(holds[:, i], truth[:, i]) for holds in answers.values()]
            table.add_row(label, f"{truth[:, i].mean():.0%}", *(f"{x:.3f}" for x in scores))
        table.add_section()
        means = [
            np.mean([f1(holds[:, i], truth[:, i]) for i in range(len(self.names))])
            for holds in answers.values()
        ]
        table.add_row("mean", "", *(f"{x:.3f}" for x in means))
        right = [(holds == truth).all(1).mean() for holds in answers.values()]
        table.add_row("all labels right", "", *(f"{x:.1%}" for x in right))
        table.caption = (
            f"{len(truth)} held-out documents; most common: always the answer of most training "
            "documents; bytes: logistic regression on bytes"
        )
        return table

    def answer_rows(self, answer: dict[str, Any], document: Document) -> Iterator[tuple[str, str]]:
        """Yield each label with its score and the truth, and the evidence."""
        (head,) = answer["heads"].values()
        (truth,) = self._labels([document])
        for name, holds in zip(self.names, truth.tolist(), strict=True):
            is_right = (name in head["labels"]) == holds
            verdict = "[green]right[/]" if is_right else "[red]wrong[/]"
            said = "yes" if name in head["labels"] else "no"
            yield escape(name), f"{said}, {head['scores'][name]:.3f} ({verdict})"
        yield from evidence_rows(answer)


def best_threshold(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> float:
    """Return the threshold with the highest F1 score, halfway between two scores.

    It is within 0.01 and 0.99. Without a label that holds, it is ``DEFAULT_THRESHOLD``.
    """
    if not truth.any():
        return DEFAULT_THRESHOLD
    ordered = np.unique(scores)
    middles = np.append((ordered[:-1] + ordered[1:]) / 2, DEFAULT_THRESHOLD).clip(0.01, 0.99)
    return float(max(middles, key=lambda threshold: f1(scores >= threshold, truth)))
