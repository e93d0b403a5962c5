"""The source of an export, a checkpoint or an ONNX file, and its traced model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from aftexport.bundle.features import Features
from aftexport.bundle.manifest import ONNX_FILE
from aftexport.heads import Head
from aftexport.pipeline.onnx_trace import trace_onnx
from aftexport.pipeline.request import Request
from aftexport.pipeline.traced_model import TracedModel
from aftexport.system.console import stage
from aftexport.system.contract import DEFAULT_OPSET
from aftexport.system.process import give_back

if TYPE_CHECKING:
    from aftexport.checkpoint import Checkpoint


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX file, which declares neither a task nor labels; see ``Checkpoint``."""

    path: Path
    kind: str = ONNX_FILE
    module: None = None
    labels: tuple[str, ...] | None = None
    tokenizer: str | None = None
    task: str | None = None
    heads: Mapping[str, Head] | None = None


def read_source(request: Request, console: Console) -> "Checkpoint | OnnxSource":
    """Return the model of a request.

    Raises:
        CheckpointError: if the file cannot be used.
    """
    if request.source.is_onnx:
        return OnnxSource(request.source.name)
    with stage(console, f"Reading {request.source.name}"):
        from aftexport.checkpoint import load  # imports torch

        return load(request.source)


def trace_source(
    source: "Checkpoint | OnnxSource",
    request: Request,
    described: Features | None,
    tokenizer: str | None,
    console: Console,
) -> TracedModel:
    """Return the traced model of a source.

    Raises:
        TraceError: if the model cannot be traced.
        UsageError: if an option does not suit the model.
    """
    options = request.options
    if isinstance(source, OnnxSource):
        with stage(console, f"Examining {request.source.name}") as progress:
            traced = trace_onnx(request, tokenizer, progress)
            give_back()
        return traced
    with stage(console, "Tracing to ONNX") as progress:
        from aftexport.pipeline.trace import trace  # imports torch

        traced = trace(
            source,
            options.to,
            options.precision,
            options.max_length,
            options.opset or DEFAULT_OPSET,
            batching=options.batching,
            vocab_size=options.vocab_size,
            num_features=options.features if described is None else described.count,
            extras=request.extras,
            tokenizer=tokenizer,
            progress=progress,
        )
        give_back()  # release the memory of intermediate graphs
    return traced
