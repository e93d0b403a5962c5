"""The printed results of ``aftexport bench``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import aftplugins
from aftexport.bench.benchmark import Result, Timing, benchmark, check_lengths, chosen_others
from aftexport.bundle.bundle import Bundle
from aftexport.bundle.manifest import Manifest
from aftexport.engines import Engine
from aftexport.engines.product_methods import method_table
from aftexport.system.console import escape, operator_table, plain_table, stage
from aftexport.system.cores import usable_cores
from aftexport.system.files import replacing_file, write_json

_MAX_STEADY_RATIO = 1.5
"""Maximum ratio of the slowest call to the median on an idle machine."""
_MIN_SHARE = 0.01
"""Operators with a smaller share of the time are not shown."""


def show(
    path: Path,
    *,
    lengths: Sequence[int] | None,
    threads: int,
    rounds: int,
    against: Sequence[str] | None,
    model: Path | None,
    factory: str | None,
    allow_pickle: bool,
    trust_remote_code: bool = False,
    json_file: Path | None,
    console: Console,
) -> Result:
    """Run ``benchmark`` on the bundle at ``path``, print the result and return it.

    Raises:
        AftexportError: as ``benchmark``, ``torch_engine`` and ``Bundle.open`` do.
    """
    others = chosen_others(
        against, has_source=model is not None or factory is not None or allow_pickle
    )
    threads = threads or usable_cores()
    with stage(console, f"Checking {path}"):
        bundle = Bundle.open(path)
    lengths = check_lengths(bundle.manifest, lengths)
    torch = None
    if "torch" in others:
        with stage(console, f"Reading {model or factory}"):
            torch = _torch_engine(bundle, model, factory, allow_pickle, trust_remote_code, threads)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Timing", total=len(lengths) * rounds)
        result = benchmark(
            bundle,
            lengths=lengths,
            threads=threads,
            rounds=rounds,
            portable="portable" in others,
            torch=torch,
            advance=lambda: progress.advance(task),
        )
    print_result(
        result, bundle.manifest, console, is_torch_missing=against is None and torch is None
    )
    if json_file is not None:
        record = {"bundle": path.name, "precision": bundle.manifest.precision, "threads": threads,
                  "rounds": rounds, **result.to_dict()}  # fmt: skip
        with replacing_file(json_file) as aside:
            write_json(aside, record)
        console.print(f"Results: [bold]{escape(str(json_file))}[/]", soft_wrap=True)
    return result


def print_result(
    result: Result, manifest: Manifest, console: Console, *, is_torch_missing: bool = False
) -> None:
    """Print the tables of a result and notes on their limits.

    Args:
        result: the result.
        manifest: the manifest of the bundle.
        console: the console of the output.
        is_torch_missing: whether PyTorch was left out because the module was not given.
    """
    console.print(timing_table(result.timings))
    for note in _notes(result, manifest, is_torch_missing=is_torch_missing):
        console.print(note, soft_wrap=True)
    if result.longest is not None:
        console.print(share_table(result.shares, result.longest))
    console.print(operator_table(manifest.operators, result.paths))
    if result.methods:
        console.print(method_table(result.methods))
    if manifest.operators and (why := aftplugins.missing("onnxruntime")):
        console.print(f"[yellow]{why}[/]")


def _torch_engine(
    bundle: Bundle,
    model: Path | None,
    factory: str | None,
    allow_pickle: bool,
    trust_remote_code: bool,
    threads: int,
) -> Engine:
    from aftexport.verify.reference_model import load_source, torch_engine  # imports torch

    source = load_source(
        bundle,
        model,
        factory=factory,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    return torch_engine(bundle, source, threads=threads)


def _notes(result: Result, manifest: Manifest, *, is_torch_missing: bool) -> list[str]:
    notes = []
    spread = max((t.slowest_seconds / t.seconds for t in result.timings), default=1.0)
    if spread > _MAX_STEADY_RATIO:
        notes.append(
            f"[yellow]One call took {spread:.1f} times the median: the machine was busy with "
            "other work, so it may be faster than these numbers.[/]"
        )
    notes += [
        f"[bold red]failed:[/] {failure.contender} with {failure.tokens:,} tokens: "
        f"{escape(failure.reason)}"
        for failure in result.failures
    ]
    if any(timing.peak_mib is None for timing in result.timings):
        notes.append("[yellow]Peak memory was not measured: this needs Linux with /proc.[/]")
    if is_torch_missing:
        notes.append(
            "[yellow]PyTorch was not compared, because a bundle does not contain the module. Give "
            f"{escape(_source_options(manifest))}.[/]"
        )
    return notes


def _source_options(manifest: Manifest) -> str:
    """Return the options that give the module of the bundle."""
    kind, _, factory = (manifest.source.get("kind") or "").rpartition(" ")
    if kind == "module of":
        return f"--factory {factory}"
    file = "--model with the file of the export"
    if kind == "pickled state dict for":
        return f"{file}, --factory {factory} and --allow-pickle"
    if kind == "state dict for":
        return f"{file}, and --factory {factory}"
    return f"{file}, and --allow-pickle" if kind == "pickled" else file


def timing_table(timings: Sequence[Timing]) -> Table:
    """Return a table of the timings, with the ratio of each to the bundle as it is served."""
    table = plain_table("tokens", "contender", "ms", "ns a token", "tokens a second",
                        "peak MiB", "times served")  # fmt: skip
    table.collapse_padding = True  # for lines of 80 characters
    for column in table.columns:
        column.justify = "left" if column.header == "contender" else "right"
    served = {t.tokens: t.seconds for t in timings if t.contender == "onnxruntime"}
    for t in timings:
        ratio = f"{t.seconds / served[t.tokens]:.2f}" if t.tokens in served else ""
        table.add_row(
            f"{t.tokens:,}", t.contender, f"{t.seconds * 1e3:,.2f}",
            f"{t.seconds / t.tokens * 1e9:,.0f}", f"{t.tokens / t.seconds:,.0f}",
            "" if t.peak_mib is None else f"{t.peak_mib:,.1f}", ratio,
        )  # fmt: skip
    return table


def share_table(shares: Mapping[str, float], tokens: int) -> Table:
    """Return a table of each operator's share in the time of the longest document."""
    table = plain_table(f"operator, {tokens:,} tokens", "share of the time")
    table.columns[1].justify = "right"
    for op_type, share in shares.items():
        if share >= _MIN_SHARE:
            table.add_row(op_type, f"{share:.0%}")
    return table
