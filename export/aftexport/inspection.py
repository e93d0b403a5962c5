"""What a bundle or a model file holds, for people."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import aftplugins
from aftexport.bundle import PARITY, Bundle
from aftexport.engines.onnxruntime import operator_paths
from aftexport.report import operator_table, size_table


def show_bundle(path: Path, console: Console) -> None:
    """Prints a bundle's manifest, its files, and which way each operator runs here.

    Raises:
        BundleError: where the bundle is damaged.
    """
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    table = _table()
    table.add_row("bundle", str(path))
    table.add_row("from", str(manifest.source["kind"]))
    if manifest.config:
        table.add_row("mechanism", str(manifest.config["mechanism"]))
    table.add_row("inputs", ", ".join(manifest.inputs))
    table.add_row("vocabulary", str(manifest.vocab_size))
    table.add_row("longest document", _tokens(manifest.max_tokens))
    table.add_row("labels", ", ".join(manifest.labels))
    table.add_row("precision", manifest.precision)
    table.add_row("opset", str(manifest.opset))
    table.add_row("parity", f"see {PARITY}" if PARITY in bundle.files else "not checked")
    table.add_row("made with", ", ".join(f"{k} {v}" for k, v in manifest.versions.items()))
    console.print(table)
    console.print(operator_table(manifest.operators, operator_paths(bundle.model_path)))
    if manifest.operators and (why := aftplugins.missing("onnxruntime")):
        console.print(f"[yellow]{why}[/]")
    console.print(size_table(bundle.files))


def show_checkpoint(path: Path, factory: str | None, console: Console) -> None:
    """Prints what a model file is and how many weights it has.

    Raises:
        CheckpointError: where it cannot be read.
    """
    from aftexport.checkpoint import load

    checkpoint = load(path, factory=factory)
    if checkpoint.program is not None:
        weights = dict(checkpoint.program.state_dict)
    else:
        assert checkpoint.module is not None
        weights = dict(checkpoint.module.state_dict())
    table = _table()
    table.add_row("model", str(path))
    table.add_row("kind", checkpoint.kind)
    config = getattr(checkpoint.module, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        for name, value in config.to_dict().items():
            table.add_row(name, str(value))
    table.add_row("weights", f"{sum(t.numel() for t in weights.values()):,} in {len(weights)}")
    table.add_row("labels", ", ".join(checkpoint.labels) if checkpoint.labels else "none")
    table.add_row("tokenizer", "yes" if checkpoint.tokenizer else "none")
    console.print(table)


def _table() -> Table:
    return Table("", "", box=box.SIMPLE, show_header=False)


def _tokens(count: int | None) -> str:
    return "any length" if count is None else f"{count} tokens"
