"""A plain ONNX file as the source of a bundle, in the place of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aftexport.bundle.manifest import ONNX_FILE
from aftexport.heads import Head


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX file, which declares neither a task nor labels; see ``Checkpoint``.

    Attributes:
        path: the file.
    """

    path: Path
    kind: str = ONNX_FILE
    module: None = None
    labels: tuple[str, ...] | None = None
    tokenizer: str | None = None
    task: str | None = None
    heads: Mapping[str, Head] | None = None
