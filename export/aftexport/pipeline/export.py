"""From a model file to a verified bundle."""

import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import torch
from rich.console import Console
from rich.progress import Progress

from aftexport._version import __version__
from aftexport.bundle.bundle import (
    CHUNKED,
    PARITY,
    PARITY_PAGE,
    TOKENIZER,
    Bundle,
    write_golden,
    write_manifest,
)
from aftexport.bundle.golden import Case
from aftexport.bundle.manifest import Manifest
from aftexport.bundle.output_path import check_destination
from aftexport.bundle.tokenizer import check_tokenizer, check_vocabulary
from aftexport.capture.precision import PRECISIONS
from aftexport.checkpoint import Checkpoint, from_factory, load
from aftexport.chunked.archive import write_chunked
from aftexport.console import escape, operator_table, size_table, stage
from aftexport.contract import SCORES
from aftexport.deploy.export_engine import build_into, check_options, show_engine
from aftexport.engines import onnxruntime as ort
from aftexport.engines.tensorrt.settings import TARGETS as ENGINE_TARGETS
from aftexport.engines.tensorrt.settings import EngineOptions, build_settings
from aftexport.errors import ParityError, TraceError, UsageError
from aftexport.heads.exclusive_labels import check_count, check_output, check_task
from aftexport.lowering.to_onnx import DEFAULT_OPSET
from aftexport.nn import DocumentClassifier
from aftexport.onnx_io import write_model
from aftexport.operators.domain import VERSION as OPERATOR_VERSION
from aftexport.operators.domain import operators_in
from aftexport.parity import TOLERANCES, Comparison, worst
from aftexport.parity.run_cases import verify
from aftexport.parity.stock_session import verify_stock
from aftexport.passes.position_bias import position_biases
from aftexport.passes.token_flow import WholeOnlyError
from aftexport.pipeline.auto_precision import Advice, advise, measurements
from aftexport.pipeline.trace import Traced, trace
from aftexport.recognition.report import show_recognition
from aftexport.report.page import write_page
from aftexport.report.report import Report, inputs_of
from aftexport.report.tables import parity_table
from aftexport.system.files import aside_folder, move_into_place, sha256, write_json
from aftexport.system.memory import give_back

TARGETS = ("onnx", *ENGINE_TARGETS)


def export(
    path: str | Path | None = None,
    *,
    to: str = "onnx",
    out: str | Path | None = None,
    precision: str = "fp32",
    tolerance: float | None = None,
    max_length: int | None = None,
    vocab_size: int | None = None,
    engine: EngineOptions | None = None,
    timing_cache: Path | None = None,
    opset: int = DEFAULT_OPSET,
    check_parity: bool = True,
    batching: bool = True,
    force: bool = False,
    factory: str | None = None,
    allow_pickle: bool = False,
    labels: Sequence[str] | None = None,
    tokenizer: str | Path | None = None,
    console: Console | None = None,
) -> Bundle:
    """Exports a model file to a bundle and compares it with PyTorch.

    Args:
        path: any of the five kinds that ``aftexport.load`` reads; None for the module as the
            factory returns it.
        to: ``onnx``; ``trt`` or ``trt-rtx``, with a TensorRT engine beside the ONNX model.
        out: the bundle's folder; ``<path without suffix>.bundle`` by default.
        precision: fp32; fp16, of weights and activations; bf16 or int8, of the products
            inside the kernels of the encoder. Sums are float32 or wider. For an engine bf16 is
            of weights and activations too, and there is no int8. AFT-full's exponentials are
            in 16 bits where ``position_bias.safe_precision`` allows it. auto: of each node of
            the encoder the cheapest of int8, bf16 and fp32 that holds ``tolerance``.
        tolerance: on the error of the model, with auto; fp32's by default.
        max_length: most tokens of a document.
        vocab_size: token ids are below this; by default as many as the model has rows for.
        engine: what else an engine is built for.
        timing_cache: file of TensorRT's kernel timings, read where it exists and written back.
        opset: of the standard operators.
        check_parity: compare with PyTorch and fail outside tolerance.
        batching: whether documents may share a run, which is refused where they would change
            each other's scores; False gives each a run of its own.
        force: replace a bundle that stands at ``out``.
        factory: ``package.module:callable`` for a bare state dict.
        allow_pickle: load a pickled module, which runs code from the file.
        labels: class names, where the file has none.
        tokenizer: path of a tokenizer.json, where the file has none.
        console: where progress goes; standard output by default.

    Raises:
        AftexportError: CheckpointError, UsageError, TraceError or EngineError with
            nothing written; ParityError with the bundle kept at ``<out>.failed``, or, with auto,
            nothing written where fp32 is outside ``tolerance`` too.
    """
    console = console or Console(emoji=False)
    fresh = path is None
    path, out = _places(path, out, factory)
    _check_choice("--to", to, TARGETS)
    _check_choice("--precision", precision, tuple(PRECISIONS))
    asked = replace(engine or EngineOptions(), max_length=max_length)
    _check_auto(precision, tolerance, to=to)
    check_options(to, asked, precision=precision, timing_cache=timing_cache)
    failed_out = out.with_name(f"{out.name}.failed")
    check_destination(out, path, force)
    check_destination(failed_out, path, force=True)

    with stage(console, f"Reading {path}"):
        checkpoint = (
            from_factory(factory or "")
            if fresh
            else load(path, factory=factory, allow_pickle=allow_pickle)
        )
        check_task(checkpoint.path, checkpoint.module)
        text = _tokenizer_text(checkpoint, tokenizer)
    with stage(console, "Tracing to ONNX") as progress:
        traced = trace(
            checkpoint,
            to,
            precision,
            max_length,
            opset,
            batching=batching,
            vocab_size=vocab_size,
            progress=progress,
        )
        give_back()  # the graphs between
    advice = _advice(traced, tolerance, console) if precision == "auto" else None
    settings = None
    if to != "onnx":
        settings = build_settings(
            to, asked, precision=traced.precision, max_tokens=traced.spec.max_tokens
        )
    check_output(traced.lowered)
    names = _labels(checkpoint, labels, traced)
    if max_length is None and (most := traced.spec.max_tokens) is not None:
        console.print(f"[yellow]Documents of at most {most} tokens: the model takes no longer.[/]")
    notes = _notes(traced, batching=batching)
    for note in notes:
        console.print(f"[yellow]{escape(note)}[/]")
    if traced.recognition is not None:
        show_recognition(traced.recognition, console)
    check_vocabulary(traced.spec.vocab_size)
    if text is not None:
        check_tokenizer(text, traced.spec.vocab_size)

    with aside_folder(out) as folder:
        with stage(console, "Writing the bundle"):
            manifest = _manifest(checkpoint, traced, names, opset, batching=batching)
            if advice is not None:
                manifest = _advised(manifest, advice)
            if to == "onnx":
                manifest = _in_chunks(folder, traced, manifest)
            draft = _draft(folder, manifest, traced, text)
        cases = traced.cases
        del checkpoint, traced  # the weights, three times, and an engine is to have them next
        give_back()
        paths = ort.operator_paths(draft.model_path)
        results: list[Comparison] = []
        if check_parity:
            with stage(console, "Comparing with PyTorch"):
                results = verify(draft)
            if all(r.passed for r in results):
                with stage(console, "Comparing in a stock session"):
                    results += verify_stock(draft, cases)
            record = {"checked": True, "cases": [r.to_dict() for r in results]}
            record["reference"] = manifest.reference
        else:
            record = {"checked": False, "cases": []}
        if settings is not None and all(r.passed for r in results):
            manifest, compared = build_into(
                draft, settings, timing_cache=timing_cache, parity=check_parity, console=console
            )
            results += compared
            record["engine"] = {
                "deferred": manifest.engine.deferred if manifest.engine else (),
                "cases": [r.to_dict() for r in compared],
            }
        write_json(folder / PARITY, record)
        write_page(folder / PARITY_PAGE, _report(manifest, results, cases, notes))
        write_manifest(folder, manifest)
        failed = not all(r.passed for r in results)
        if failed:
            out = failed_out
        check_destination(out, path, force or failed)  # another may have been written meanwhile
        move_into_place(folder, out)

    bundle = Bundle.open(out)
    _print_summary(console, bundle, paths, results)
    if failed:
        raise _outside(worst(results), out, precision)
    return bundle


def _places(
    path: str | Path | None, out: str | Path | None, factory: str | None
) -> tuple[Path, Path]:
    """Where the model is, or else the name of its factory, and where the bundle is to be."""
    path = Path((factory or "").rpartition(":")[2] if path is None else path)
    if out is None:
        # "." has no name of its own to put the suffix on.
        out = (path if path.name else path.resolve()).with_suffix(".bundle")
    out = Path(out) if Path(out).name else Path(out).resolve()
    if not out.name:
        raise UsageError(f"--out {out} is no folder that can be made.", "Choose another folder.")
    return path, out


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(
            f"{option} {value!r} is not known.", f"Choose one of {', '.join(choices)}."
        )


def _check_auto(precision: str, tolerance: float | None, *, to: str) -> None:
    if precision != "auto" and tolerance is not None:
        raise UsageError("--tolerance is for --precision auto.", "Leave it out, or add that.")
    if precision == "auto" and to != "onnx":
        raise UsageError(
            "--precision auto is for --to onnx: an engine has one precision.",
            "Choose one of fp32, fp16 and bf16.",
        )
    if tolerance is not None and not 0 < tolerance < float("inf"):
        raise UsageError(f"--tolerance {tolerance} is no bound.", "Give a number above 0.")


def _advice(traced: Traced, tolerance: float | None, console: Console) -> Advice:
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("Measuring each node", total=measurements(traced.model))
        bound = TOLERANCES["fp32"].bound if tolerance is None else tolerance
        return advise(traced.model, traced.cases, bound, lambda: bar.advance(task))


def _advised(manifest: Manifest, advice: Advice) -> Manifest:
    changes = {
        "precision": advice.coarsest,
        "tolerance": advice.tolerance,
        "node_precisions": advice.nodes,
    }
    return manifest.model_copy(update=changes)


def _tokenizer_text(checkpoint: Checkpoint, given: str | Path | None) -> str | None:
    if given is None:
        return checkpoint.tokenizer
    try:
        return Path(given).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tokenizer {given}: {error}.", "Check the path.") from error


def _labels(checkpoint: Checkpoint, given: Sequence[str] | None, traced: Traced) -> tuple[str, ...]:
    logits = traced.cases[0].expected
    if logits.ndim != 2:
        raise TraceError(
            f"The model puts out a tensor of shape {logits.shape}.",
            "Export a classifier, logits [batch, classes]; any other model by torch.onnx.export, "
            "and run aftexport fuse.",
        )
    count = logits.shape[1]
    check_count(count)
    names = given if given is not None else checkpoint.labels
    if names is None:
        return tuple(f"class_{i}" for i in range(count))
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UsageError("The labels are not a list of names.", "Give one name for each class.")
    if not all(map(_is_unicode, names)):
        raise UsageError("The labels are not UTF-8.", "Give them in a locale of UTF-8.")
    if len(names) != count or len(set(names)) != count or not all(names):
        raise UsageError(
            f"There are {len(set(filter(None, names)))} different labels for {count} classes.",
            "Give one name for each class.",
        )
    return tuple(names)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that its locale has no letters for
        return False
    return True


def _manifest(
    checkpoint: Checkpoint,
    traced: Traced,
    labels: tuple[str, ...],
    opset: int,
    *,
    batching: bool,
) -> Manifest:
    module = checkpoint.module
    config: dict[str, Any] | None = None
    if isinstance(module, DocumentClassifier):
        config = module.config.to_dict()
    evidence = traced.evidence
    digest = sha256(checkpoint.path) if checkpoint.path.is_file() else None
    return Manifest.model_validate(
        {
            "source": {"kind": checkpoint.kind, "sha256": digest},
            "config": config,
            "inputs": traced.spec.names,
            "vocab_size": traced.spec.vocab_size,
            "max_tokens": traced.spec.max_tokens,
            "batching": batching,
            "labels": labels,
            "precision": traced.precision,
            "reference": traced.reference,
            "opset": opset,
            "operators": operators_in(traced.model),
            "position_biases": position_biases(traced.model),
            "operator_version": OPERATOR_VERSION,
            "hardware": "any",
            "evidence": None if isinstance(evidence, str) else evidence,
            "no_evidence": evidence if isinstance(evidence, str) else None,
            "versions": {
                "aftexport": __version__,
                "onnx": onnx.__version__,
                "onnxruntime": ort.VERSION,
                "onnxscript": onnxscript.__version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
        }
    )


def _in_chunks(folder: Path, traced: Traced, manifest: Manifest) -> Manifest:
    """Writes the graphs for documents longer than memory, where the model has them."""
    try:
        plan = write_chunked(folder / CHUNKED, traced.lowered, precision=traced.precision)
        give_back()  # what it was cut into
    except WholeOnlyError as reason:
        (folder / CHUNKED).unlink(missing_ok=True)
        return manifest.model_copy(update={"whole_only": str(reason)})
    return manifest.model_copy(update={"chunked": plan})


def _draft(folder: Path, manifest: Manifest, traced: Traced, tokenizer: str | None) -> Bundle:
    """Writes what a bundle holds whatever its parity is; its manifest is not final."""
    write_model(folder, traced.model)
    write_golden(folder, list(traced.cases))
    if tokenizer is not None:
        (folder / TOKENIZER).write_text(tokenizer, "utf-8")
    return Bundle(folder, manifest, {}, "")


def _outside(furthest: Comparison, kept: Path, precision: str) -> ParityError:
    return ParityError(
        f"Parity failed: {furthest.subject}, case {furthest.case!r}: error "
        f"{furthest.error:.1e}, bound {furthest.bound:.0e}.",
        f"The bundle is kept at {kept} for a look; "
        + ("try --precision fp32." if precision != "fp32" else "see its parity.html."),
    )


def _notes(traced: Traced, *, batching: bool) -> list[str]:
    """Return what the export does otherwise than a user may expect, a sentence each."""
    notes = []
    if not batching:
        notes.append("Each document has a run of its own (--no-batching).")
    if traced.left_out:
        notes.append(
            f"Left out, at its default: {', '.join(traced.left_out)}. The model is exported for "
            "documents without padding."
            if "lengths" not in traced.spec.names
            else f"Left out, at its default: {', '.join(traced.left_out)}. Padding is told by "
            "lengths alone."
        )
    if traced.why_not_float64:
        notes.append(
            f"PyTorch was run in {traced.reference}, as the model's forward does not run in "
            f"float64 ({traced.why_not_float64}): its own rounding is part of every error."
        )
    return notes


def _report(
    manifest: Manifest,
    results: Sequence[Comparison],
    cases: Sequence[Case],
    notes: Sequence[str],
) -> Report:
    deferred = manifest.engine.deferred if manifest.engine else ()
    return Report(
        manifest,
        results,
        against=f"PyTorch in {manifest.reference}",
        notes=[*notes, *(f"Deferred: {line}" for line in deferred)],
        inputs=inputs_of(cases),
    )


def _print_summary(
    console: Console, bundle: Bundle, paths: dict[str, str], results: Sequence[Comparison]
) -> None:
    console.print(operator_table(bundle.manifest.operators, paths))
    if results:
        console.print(parity_table(results, bundle.manifest.reference))
    else:
        console.print("[yellow]Parity was not checked (--no-verify).[/]")
    if plan := bundle.manifest.engine:
        show_engine(plan, bundle.path, console)
    console.print(f"Scores: {SCORES}.")
    console.print(size_table(bundle.files))
