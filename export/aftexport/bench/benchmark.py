"""The speed of a bundle on this machine, compared with other ways to run its model, as tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import aftplugins
from aftexport.bench.timing import peak_mib, sample
from aftexport.bundle.bundle import Bundle
from aftexport.bundle.manifest import Manifest
from aftexport.engines import Engine, Tensors
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, operator_paths
from aftexport.engines.onnxruntime.engine import operator_shares
from aftexport.engines.product_methods import method_table, product_methods
from aftexport.errors import EngineError, UsageError
from aftexport.extra_inputs import sample_values
from aftexport.options import ModelSource
from aftexport.system.console import escape, operator_table, plain_table, stage
from aftexport.system.contract import MAX_TOKENS
from aftexport.system.files import replacing_file, write_json
from aftexport.system.process import usable_cores
from aftexport.verify.documents import as_inputs, random_document
from aftplugins.methods import MethodChoice

OTHERS = ("portable", "torch")
LENGTHS = (1_024, 4_096, 16_384)


@dataclass(frozen=True)
class Timing:
    """The timing of one contender at one length.

    Attributes:
        contender: ``onnxruntime``, the bundle as it is served; ``portable``, without the
            fused kernels; ``torch``, the PyTorch module.
        tokens: length of the document.
        seconds: median time of a call.
        peak_mib: increase of memory during a call, in MiB; None if it cannot be measured.
        slowest_seconds: time of the slowest call.
    """

    contender: str
    tokens: int
    seconds: float
    peak_mib: float | None
    slowest_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, with the seconds per token and the tokens per second."""
        rates = {
            "seconds_per_token": self.seconds / self.tokens,
            "tokens_per_second": self.tokens / self.seconds,
        }
        return asdict(self) | rates


@dataclass(frozen=True)
class Failure:
    """A contender that does not run at a length, and the reason."""

    contender: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class Result:
    """The timings by length, then contender, the failures in the same order, and the operators."""

    timings: Sequence[Timing]
    failures: Sequence[Failure]
    paths: Mapping[str, str]
    shares: Mapping[str, float]
    methods: Sequence[MethodChoice]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "rows": [timing.to_dict() for timing in self.timings],
            "failures": [asdict(failure) for failure in self.failures],
            "operators": dict(self.paths),
            "shares": dict(self.shares),
            "methods": [asdict(choice) for choice in self.methods],
        }

    @property
    def longest(self) -> int | None:
        """The longest document that ``onnxruntime`` was timed with; None if it always failed."""
        return max((t.tokens for t in self.timings if t.contender == "onnxruntime"), default=None)


def benchmark(
    bundle: Bundle,
    *,
    lengths: Sequence[int] | None = None,
    threads: int = 0,
    rounds: int = 5,
    portable: bool = True,
    torch: Engine | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """Time one document of each length, the contenders in turn; call ``advance`` after every round.

    Raises:
        UsageError: if the model does not accept a length.
        EngineError: if a runtime refuses the model, or nothing runs at any length.
    """
    lengths = check_lengths(bundle.manifest, lengths)
    engines: dict[str, Engine] = {
        "onnxruntime": OnnxRuntimeEngine(bundle.model_path, threads=threads)
    }
    if portable:
        engines["portable"] = OnnxRuntimeEngine(bundle.model_path, threads=threads, fused=False)
    if torch is not None:
        engines["torch"] = torch
    timings, failures, errors = [], [], []
    for tokens in lengths:
        inputs = _document(bundle.manifest, tokens)
        runs = {}
        for name, engine in engines.items():
            run = partial(engine.run, inputs)
            try:
                run()
                runs[name] = run
            except EngineError as error:
                failures.append(Failure(name, tokens, error.problem))
                errors.append(error)
        seconds = sample(runs, rounds, advance)
        for name, run in runs.items():
            engines[name].release()  # memory kept from earlier runs would not be counted
            taken = seconds[name]
            timings.append(Timing(name, tokens, median(taken), peak_mib(run), max(taken)))
    if not timings:
        raise errors[-1]
    paths = operator_paths(bundle.model_path)
    methods = product_methods(bundle.model_path, bundle.manifest.precision)
    result = Result(timings, failures, paths, {}, methods)
    if result.longest is None:
        return result
    longest = _document(bundle.manifest, result.longest)
    return replace(result, shares=operator_shares(bundle.model_path, longest, threads=threads))


def check_lengths(manifest: Manifest, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """Return the lengths to time, in ascending order.

    Raises:
        UsageError: if a length is not from 1 to the model's maximum.
    """
    limit = min(manifest.max_tokens or MAX_TOKENS, MAX_TOKENS)
    if lengths is None:
        return tuple(length for length in LENGTHS if length <= limit) or (limit,)
    for length in lengths:
        if not 1 <= length <= limit:
            raise UsageError(
                f"--lengths must be from 1 to {limit} for this model, got {length}.",
                f"Give lengths from 1 to {limit}.",
            )
    return tuple(sorted(set(lengths)))


def _document(manifest: Manifest, tokens: int) -> Tensors:
    generator = np.random.default_rng(0)
    document = random_document(tokens, manifest, generator)
    extras = sample_values(manifest.extra_inputs, generator, tokens)
    return as_inputs([document], manifest, [extras])


def chosen_others(against: Sequence[str] | None, *, has_source: bool) -> tuple[str, ...]:
    """Return the contenders of ``OTHERS`` to compare with.

    Raises:
        UsageError: if a name is unknown, or torch is chosen without the module.
    """
    if against is None:
        return OTHERS if has_source else ("portable",)
    if has_source and "torch" not in against:
        raise UsageError(
            f"Expected torch in --against for the given module, got {', '.join(against)}.",
            "Add torch, or leave out --model, --factory, --allow-pickle and --trust-remote-code.",
        )
    if list(against) == ["none"]:
        return ()
    if unknown := [name for name in against if name not in OTHERS]:
        raise UsageError(
            f"--against must be none or from portable, torch, got {unknown[0]!r}.",
            "Choose from portable and torch, or give none.",
        )
    if "torch" in against and not has_source:
        raise UsageError(
            "--against torch needs the PyTorch model, which a bundle does not contain.",
            "Add --model with the file of the export, or --factory for an export without a file.",
        )
    return tuple(against)


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
    source: ModelSource,
    output: Path | None,
    console: Console,
) -> tuple[Result, dict[str, Any]]:
    """Run ``benchmark`` on the bundle at ``path`` and print the result.

    Returns:
        The result, and its record in JSON, which ``output`` gets too.

    Raises:
        AftexportError: as ``benchmark``, ``torch_engine`` and ``Bundle.open`` do.
    """
    has_source = source.path is not None or source.factory is not None or source.allow_pickle
    others = chosen_others(against, has_source=has_source)
    threads = threads or usable_cores()
    with stage(console, f"Checking {path}"):
        bundle = Bundle.open(path)
    lengths = check_lengths(bundle.manifest, lengths)
    torch = None
    if "torch" in others:
        with stage(console, f"Reading {source.name}"):
            from aftexport.verify.reference_model import load_source, torch_engine  # imports torch

            torch = torch_engine(bundle, load_source(bundle, source), threads=threads)
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
    record = {"bundle": path.name, "precision": bundle.manifest.precision, "threads": threads,
              "rounds": rounds, **result.to_dict()}  # fmt: skip
    if output is not None:
        with replacing_file(output) as aside:
            write_json(aside, record)
        console.print(f"Results: [bold]{escape(str(output))}[/]", soft_wrap=True)
    return result, record


def print_result(
    result: Result, manifest: Manifest, console: Console, *, is_torch_missing: bool = False
) -> None:
    """Print the tables of a result and notes on their limits."""
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
