"""The package of a source file, or the label of a document of the user."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from aftexport.demo.baseline import byte_regression, majority
from aftexport.demo.corpus import Corpus, cap, installed_packages
from aftexport.demo.documents import Document
from aftexport.demo.judging import HeldOut
from aftexport.demo.options import DemoOptions
from aftexport.demo.own_documents import read_documents
from aftexport.demo.split import Split
from aftexport.demo.tasks.task import Outputs, Task, numbers_table, show_counts
from aftexport.demo.training import STEPS
from aftexport.system.console import escape, stage

_PER_CLASS = 250
_LABELS_SHOWN = 20


class _Label:
    """The label of a document, which holds for each part of it."""

    def __init__(self, index: int) -> None:
        self._index = torch.tensor(index)

    def part(self, start: int, stop: int) -> Tensor:
        """Return the label; see ``Target``."""
        return self._index


class SingleLabel(Task):
    """The package of a source file; package names and leading comments are removed."""

    problem_type: ClassVar[str] = "single_label_classification"
    steps: ClassVar[int] = STEPS

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    @classmethod
    def collect(cls, options: DemoOptions, console: Console) -> Corpus:
        """Return the user's documents, or source files without the names of packages."""
        per_class = options.size.per_class or _PER_CLASS
        if options.data is None:
            with stage(console, "Collecting source files of installed packages"):
                corpus = installed_packages(
                    num_classes=options.size.classes, per_class=per_class, seed=options.seed
                )
            console.print(
                "Task: find the package of a source file. Package names, import aliases and "
                "leading comments are removed. Code copied from other projects is left out."
            )
            return corpus
        with stage(console, f"Reading {options.data}"):
            everything = read_documents(options.data)
        share = options.size.classes * per_class // len(everything.classes)
        kept = cap(everything.labels, max(8, share), options.seed)
        if len(kept) < len(everything):
            console.print(
                f"[yellow]Drawn at random: {len(kept)} of {len(everything)} documents.[/]"
            )
        return everything.take(kept)

    @classmethod
    def of(cls, train: Corpus) -> Self:
        """Return the task for the labels of ``train``."""
        return cls(tuple(train.classes))

    def show_split(self, parts: Split, console: Console) -> None:
        """Print the number of documents of each label."""
        table = numbers_table("label", "training", "held out")
        for label in self.names[:_LABELS_SHOWN]:
            counts = [str(part.labels.count(label)) for part in (parts.train, parts.test)]
            table.add_row(escape(label), *counts)
        if len(self.names) > _LABELS_SHOWN:
            table.add_row(f"{len(self.names) - _LABELS_SHOWN} more labels", "", "")
        table.add_section()
        table.add_row("documents", str(len(parts.train)), str(len(parts.test)))
        console.print(table)
        show_counts(parts, console)

    def target(self, document: Document) -> _Label:
        """Return the label."""
        return _Label(self.names.index(document.label))

    def results(
        self, train: Sequence[Document], held_out: HeldOut, outputs: Outputs, name: str
    ) -> Table:
        """Return the accuracies; see ``Task``."""
        corpus = Corpus(tuple(d.text for d in train), tuple(d.label for d in train))
        truth = [document.label for document in held_out.documents]
        answers = {
            "always the most common label": majority(corpus, held_out.texts),
            "logistic regression on bytes": byte_regression(corpus, held_out.texts),
            f"[bold]{name}[/]": [self.names[int(logits.argmax())] for logits in outputs],
        }
        table = numbers_table("classifier", f"accuracy, {len(truth)} held-out documents")
        for classifier, labels in answers.items():
            table.add_row(classifier, f"{accuracy(labels, truth):.1%}")
        return table

    def answer_rows(self, answer: dict[str, Any], document: Document) -> Iterator[tuple[str, str]]:
        """Yield the label and the best scores."""
        is_right = answer["label"] == document.label
        verdict = (
            "[green]right[/]" if is_right else f"[red]wrong[/], it is {escape(document.label)}"
        )
        yield "label", f"[bold]{escape(answer['label'])}[/] ({verdict})"
        best = sorted(answer["scores"].items(), key=lambda item: -item[1])[:3]
        yield "scores", ", ".join(f"{escape(name)} {score:.3f}" for name, score in best)


def accuracy(answers: Sequence[str], truth: Sequence[str]) -> float:
    """Return the share of answers that equal the truth."""
    pairs = zip(answers, truth, strict=True)
    return sum(answer == label for answer, label in pairs) / len(truth)
