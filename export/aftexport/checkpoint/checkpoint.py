"""A model that was read from a file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from torch import nn
from torch.export import ExportedProgram

from aftexport.heads import Head
from aftexport.heads.declared_task import Declaration


@dataclass(frozen=True)
class Checkpoint:
    """A model that was read from a file.

    Attributes:
        path: the file or folder.
        kind: the kind of file, for messages.
        module: the model in float32 or as stored; None for a captured program.
        program: the captured program; None for a module.
        labels: the names that its head gives to its numbers; None if the file has none.
        task: the task that it declares, one of ``heads.HEADS``; None if it declares none.
        heads: the head of each output, for a file that describes them all; None otherwise.
        tokenizer: JSON of the ``tokenizers`` library; None if the file has none.
        text_pairs: whether the file declares that documents are pairs of texts.
    """

    path: Path
    kind: str
    module: nn.Module | None = None
    program: ExportedProgram | None = None
    labels: tuple[str, ...] | None = None
    tokenizer: str | None = None
    task: str | None = None
    heads: Mapping[str, Head] | None = None
    text_pairs: bool = False

    def with_declared(self, declared: Declaration) -> Self:
        """Return this checkpoint, with the task and the names that it does not have itself."""
        known = Declaration(self.task, self.labels).or_else(declared)
        return replace(self, task=known.task, labels=known.labels)
