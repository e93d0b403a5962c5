"""How fast a bundle runs on this machine, and against what."""

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
from aftexport.console import escape, operator_table, plain_table, stage
from aftexport.contract import MAX_TOKENS
from aftexport.engines import Engine, Tensors
from aftexport.engines.onnxruntime import OnnxRuntimeEngine, operator_paths
from aftexport.engines.onnxruntime_profile import operator_shares
from aftexport.errors import EngineError, UsageError
from aftexport.system.cores import usable_cores
from aftexport.system.files import replacing_file, write_json

OTHERS = ("portable", "torch")
LENGTHS = (1_024, 4_096, 16_384)
_STEADY = 1.5
"""The slowest call of a machine that has nothing else to do takes fewer medians."""


@dataclass(frozen=True)
class Timing:
    """One contender at one length.

    Attributes:
        contender: ``onnxruntime``, the bundle as it is served; ``portable``, without the
            fused kernels; ``torch``, the PyTorch module.
        tokens: of the one document.
        seconds: of a call, the median.
        peak_mib: by which memory rose during a call; None where it cannot be measured.
        slowest_seconds: of the slowest of those calls.
    """

    contender: str
    tokens: int
    seconds: float
    peak_mib: float | None
    slowest_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the seconds a token and the tokens a second."""
        rates = {
            "seconds_per_token": self.seconds / self.tokens,
            "tokens_per_second": self.tokens / self.seconds,
        }
        return asdict(self) | rates


@dataclass(frozen=True)
class Failure:
    """A contender that does not run at a length; ``reason`` is what it said."""

    contender: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class Result:
    """What ``benchmark`` found.

    Attributes:
        timings: by length, then contender.
        failures: where there are none, in the same order.
        paths: ``fused`` or ``portable`` for each custom operator of the model.
        shares: of each operator type in the time of the longest document that was timed as
            served; none where there was none.
    """

    timings: Sequence[Timing]
    failures: Sequence[Failure]
    paths: Mapping[str, str]
    shares: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "rows": [timing.to_dict() for timing in self.timings],
            "failures": [asdict(failure) for failure in self.failures],
            "operators": dict(self.paths),
            "shares": dict(self.shares),
        }

    @property
    def longest(self) -> int | None:
        """The most tokens that the bundle was timed at as it is served."""
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
    """Times one document of each length, the contenders in turn.

    Args:
        bundle: whose model is timed, as ``aftserve`` runs it.
        lengths: in tokens; None for those of ``LENGTHS`` that the model takes.
        threads: of one operator; 0 for ``usable_cores``.
        rounds: timed calls of each contender at each length.
        portable: time the portable bodies as well.
        torch: the PyTorch module, where it is to be compared; see ``source.torch_engine``.
        advance: called after every round.

    Raises:
        UsageError: where a length is none the model takes.
        EngineError: where a runtime refuses the model, or nothing runs at any length.
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
            engines[name].release()  # what it kept would not be counted
            taken = seconds[name]
            timings.append(Timing(name, tokens, median(taken), peak_mib(run), max(taken)))
    if not timings:
        raise errors[-1]
    result = Result(timings, failures, operator_paths(bundle.model_path), {})
    if result.longest is None:
        return result
    longest = _document(bundle.manifest, result.longest)
    return replace(result, shares=operator_shares(bundle.model_path, longest, threads=threads))


def check_lengths(manifest: Manifest, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """The lengths to time, in rising order.

    Raises:
        UsageError: where one is not from 1 to the most tokens the model takes.
    """
    limit = min(manifest.max_tokens or MAX_TOKENS, MAX_TOKENS)
    if lengths is None:
        return tuple(length for length in LENGTHS if length <= limit) or (limit,)
    for length in lengths:
        if not 1 <= length <= limit:
            raise UsageError(
                f"A document of {length} tokens is none this model takes.",
                f"Give lengths from 1 to {limit}.",
            )
    return tuple(sorted(set(lengths)))


def _document(manifest: Manifest, tokens: int) -> Tensors:
    ids = np.random.default_rng(0).integers(0, manifest.vocab_size, (1, tokens), dtype=np.int64)
    inputs = {"input_ids": ids, "lengths": np.array([tokens], dtype=np.int64)}
    return {name: inputs[name] for name in manifest.inputs}


def chosen_others(against: Sequence[str] | None, *, has_source: bool) -> tuple[str, ...]:
    """Which of ``OTHERS`` to compare with.

    Args:
        against: their names, or ``none``; None for all that can be.
        has_source: whether the PyTorch module is given.

    Raises:
        UsageError: for a name that is none of them, or for torch without the module.
    """
    if against is None:
        return OTHERS if has_source else ("portable",)
    if list(against) == ["none"]:
        return ()
    if unknown := [name for name in against if name not in OTHERS]:
        raise UsageError(
            f"--against {unknown[0]!r} is not known.", "Choose from portable, torch; or none."
        )
    if "torch" in against and not has_source:
        raise UsageError(
            "--against torch needs the PyTorch model, which a bundle does not hold.",
            "Add --model with the file it was exported from, or --factory where there was none.",
        )
    return tuple(against)


def _source_options(manifest: Manifest) -> str:
    """The options that give the module the bundle was exported from."""
    kind, _, factory = (manifest.source.get("kind") or "").rpartition(" ")
    if kind == "module of":
        return f"--factory {factory}"
    file = "--model with the file it was exported from"
    if kind == "pickled state dict for":
        return f"{file}, --factory {factory} and --allow-pickle"
    if kind == "state dict for":
        return f"{file}, and --factory {factory}"
    return f"{file}, and --allow-pickle" if kind == "pickled" else file


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
    json_file: Path | None,
    console: Console,
) -> Result:
    """Runs ``benchmark`` on the bundle at ``path`` and prints what it found.

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
            from aftexport.verify.reference_model import load_source, torch_engine

            source = load_source(bundle, model, factory=factory, allow_pickle=allow_pickle)
            torch = torch_engine(bundle, source, threads=threads)
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
    console.print(timing_table(result.timings))
    spread = max((t.slowest_seconds / t.seconds for t in result.timings), default=1.0)
    if spread > _STEADY:
        console.print(
            f"[yellow]One call took {spread:.1f} times the median: the machine was busy with "
            "something else, and may be faster than this.[/]",
            soft_wrap=True,
        )
    for failure in result.failures:
        console.print(
            f"[bold red]failed:[/] {failure.contender} with {failure.tokens:,} tokens: "
            f"{escape(failure.reason)}",
            soft_wrap=True,
        )
    if any(timing.peak_mib is None for timing in result.timings):
        console.print("[yellow]Peak memory was not measured: that takes Linux and its /proc.[/]")
    if against is None and "torch" not in others:
        console.print(
            "[yellow]PyTorch was not compared: a bundle does not hold the module; give "
            f"{escape(_source_options(bundle.manifest))}.[/]",
            soft_wrap=True,
        )
    if result.longest is not None:
        console.print(share_table(result.shares, result.longest))
    console.print(operator_table(bundle.manifest.operators, result.paths))
    if bundle.manifest.operators and (why := aftplugins.missing("onnxruntime")):
        console.print(f"[yellow]{why}[/]")
    if json_file is not None:
        record = {"bundle": path.name, "precision": bundle.manifest.precision, "threads": threads,
                  "rounds": rounds, **result.to_dict()}  # fmt: skip
        with replacing_file(json_file) as aside:
            write_json(aside, record)
        console.print(f"Results: [bold]{escape(str(json_file))}[/]", soft_wrap=True)
    return result


def timing_table(timings: Sequence[Timing]) -> Table:
    """Each timing, and how many times longer it took than the bundle as it is served."""
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
    """Where the time of the longest document goes; what takes under a hundredth is left out."""
    table = plain_table(f"operator, {tokens:,} tokens", "share of the time")
    table.columns[1].justify = "right"
    for op_type, share in shares.items():
        if share >= 0.01:
            table.add_row(op_type, f"{share:.0%}")
    return table
