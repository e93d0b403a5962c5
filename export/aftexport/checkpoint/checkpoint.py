"""A model that was read from a file."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram


@dataclass(frozen=True)
class Checkpoint:
    """A model that was read from a file.

    Attributes:
        path: the file or folder.
        kind: the kind of file, for messages.
        module: the model in float32 or as stored; None for a captured program.
        program: the captured program; None for a module.
        labels: class names in the order of the logits; None if the file has none.
        tokenizer: JSON of the ``tokenizers`` library; None if the file has none.
    """

    path: Path
    kind: str
    module: nn.Module | None = None
    program: ExportedProgram | None = None
    labels: tuple[str, ...] | None = None
    tokenizer: str | None = None
