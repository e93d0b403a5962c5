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
from aftexport.pipeline.options import ExportOptions
from aftexport.pipeline.traced_model import TracedModel
from aftexport.system.console import stage
from aftexport.system.contract import DEFAULT_OPSET
from aftexport.system.process import give_back

if TYPE_CHECKING:
    from aftexport.checkpoint import Checkpoint


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


def read_source(options: ExportOptions, console: Console) -> "Checkpoint | OnnxSource":
    """Return the model that the options name.

    Raises:
        CheckpointError: if the file cannot be used.
    """
    if options.is_onnx:
        return OnnxSource(options.source)
    with stage(console, f"Reading {options.source}"):
        from aftexport.checkpoint import from_factory, load  # imports torch

        if options.is_from_factory:
            return from_factory(options.factory or "")
        return load(
            options.source,
            factory=options.factory,
            allow_pickle=options.allow_pickle,
            trust_remote_code=options.trust_remote_code,
        )


def trace_source(
    source: "Checkpoint | OnnxSource",
    options: ExportOptions,
    described: Features | None,
    tokenizer: str | None,
    console: Console,
) -> TracedModel:
    """Return the traced model of a source.

    Args:
        source: the model.
        options: the options of the export.
        described: the features that a file describes.
        tokenizer: the text of a tokenizer.json; None without one.
        console: the console for the progress.

    Raises:
        TraceError: if the model cannot be traced.
        UsageError: if an option does not suit the model.
    """
    if isinstance(source, OnnxSource):
        with stage(console, f"Examining {options.source}") as progress:
            traced = trace_onnx(options, tokenizer, progress)
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
            extras=options.inputs,
            tokenizer=tokenizer,
            progress=progress,
        )
        give_back()  # release the memory of intermediate graphs
    return traced
