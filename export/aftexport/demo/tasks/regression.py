"""The share of comments and docstrings in the lines of a source file."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from aftexport.demo.baseline import byte_values
from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import Document
from aftexport.demo.judging import HeldOut
from aftexport.demo.options import DemoOptions
from aftexport.demo.python_source import find_lines
from aftexport.demo.split import Split
from aftexport.demo.tasks.task import (
    Outputs,
    Task,
    evidence_rows,
    numbers_table,
    show_counts,
    source_files,
)
from aftexport.heads.regression import Regression, Value

Values = NDArray[np.float64]


class _Share:
    """The standardized percentage of a document's lines that are prose.

    Args:
        document: the document.
        offset: the mean of the percentages of documents.
        scale: their standard deviation.
    """

    def __init__(self, document: Document, offset: float, scale: float) -> None:
        lines = find_lines(document.text)
        self._tokens = document.tokens_at([place for place, _ in lines])
        self._before = np.cumsum([0, *(is_prose for _, is_prose in lines)])
        self._offset, self._scale = offset, scale

    def part(self, start: int, stop: int) -> Tensor:
        """Return the value for the lines that begin in a part; see ``Target``."""
        first, end = np.searchsorted(self._tokens, [start, stop]).tolist()
        percent = 100 * (self._before[end] - self._before[first]) / max(1, end - first)
        return torch.tensor([(percent - self._offset) / self._scale], dtype=torch.float32)


class ProseShare(Task):
    """The share of comments and docstrings, which ``ast`` and ``tokenize`` find.

    Args:
        offset: the mean of the percentages of training documents.
        scale: their standard deviation.
    """

    problem_type: ClassVar[str] = "regression"
    evidence: ClassVar[int] = 3
    names = ("prose",)

    def __init__(self, offset: float, scale: float) -> None:
        self._offset, self._scale = offset, scale

    @classmethod
    def collect(cls, options: DemoOptions, console: Console) -> Corpus:
        """Return source files."""
        corpus = source_files(options, console)
        console.print(
            "Task: find the percentage of lines that are comments or docstrings. Blank lines do "
            "not count. The truth comes from Python's modules ast and tokenize."
        )
        return corpus

    @classmethod
    def of(cls, train: Corpus) -> Self:
        """Return the task for the mean and the deviation of training documents."""
        values = np.array([_percent(text) for text in train.texts])
        return cls(float(values.mean()), max(1.0, float(values.std())))

    @property
    def head(self) -> Regression:
        """The value with its unit, range and scale."""
        return Regression(
            values=(
                Value(
                    name="prose",
                    unit="percent",
                    minimum=0.0,
                    maximum=100.0,
                    scale=self._scale,
                    offset=self._offset,
                ),
            )
        )

    def show_split(self, parts: Split, console: Console) -> None:
        """Print the number of documents, and the values of training."""
        show_counts(parts, console)
        console.print(f"Comments and docstrings: {self._offset:.0f} +- {self._scale:.0f} percent.")

    def target(self, document: Document) -> _Share:
        """Return the share."""
        return _Share(document, self._offset, self._scale)

    def results(
        self, train: Sequence[Document], held_out: HeldOut, outputs: Outputs, name: str
    ) -> Table:
        """Return R squared and the mean absolute error; see ``Task``."""
        fitted, truth = (
            np.array([_percent(document.text) for document in documents])
            for documents in (train, held_out.documents)
        )
        answers = {
            "always the mean": np.full(len(truth), fitted.mean()),
            "ridge regression on bytes": byte_values(
                [document.text for document in train], fitted, held_out.texts
            ),
            f"[bold]{name}[/]": self.head.scores(np.stack(outputs).astype(np.float64))[:, 0],
        }
        table = numbers_table("model", "R squared", "mean absolute error")
        for title, values in answers.items():
            error = np.abs(values - truth).mean()
            table.add_row(title, f"{r_squared(values, truth):.3f}", f"{error:.1f} percent")
        table.caption = f"{len(truth)} held-out documents"
        return table

    def answer_rows(self, answer: dict[str, Any], document: Document) -> Iterator[tuple[str, str]]:
        """Yield the value beside the truth, and the evidence."""
        (head,) = answer["heads"].values()
        truth = _percent(document.text)
        yield "prose", f"[bold]{head['values']['prose']:.1f} percent[/], it is {truth:.1f}"
        yield from evidence_rows(answer)


def _percent(text: str) -> float:
    lines = find_lines(text)
    return 100 * sum(is_prose for _, is_prose in lines) / max(1, len(lines))


def r_squared(values: Values, truth: Values) -> float:
    """Return the share of the variance that the values explain; at most 1."""
    return float(1 - ((values - truth) ** 2).sum() / ((truth - truth.mean()) ** 2).sum())
