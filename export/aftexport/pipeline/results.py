"""The results of an export: its parity record, its report, its notes, its error and its summary."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.golden import Case
from aftexport.bundle.manifest import Manifest
from aftexport.chunked.softmaxes import count_softmax_attention
from aftexport.deploy.build_engine import show_engine
from aftexport.deploy.summary import gaps, next_command, operators_sentence
from aftexport.engines.product_methods import ProductShares
from aftexport.errors import ParityError
from aftexport.parity import Comparison
from aftexport.parity.report import Report, inputs_of, parity_table, print_meanings, subject_of
from aftexport.pipeline.traced_model import TracedModel
from aftexport.pipeline.value_ranges import MAX_FLOAT16
from aftexport.system.console import escape, operator_table, size_table, size_text


def parity_record(
    results: Sequence[Comparison], reference: str, *, checked: bool
) -> dict[str, Any]:
    """Return the content of parity.json, without products and an engine."""
    if not checked:
        return {"checked": False, "cases": []}
    cases = [r.to_dict() for r in results]
    return {"checked": True, "cases": cases, "reference": reference}


def engine_record(manifest: Manifest, compared: Sequence[Comparison]) -> dict[str, Any]:
    """Return the entry of parity.json for an engine."""
    return {
        "deferred": manifest.engine.deferred if manifest.engine else (),
        "cases": [r.to_dict() for r in compared],
    }


def parity_report(
    manifest: Manifest,
    results: Sequence[Comparison],
    cases: Sequence[Case],
    notes: Sequence[str],
) -> Report:
    """Return the content of parity.html."""
    deferred = manifest.engine.deferred if manifest.engine else ()
    return Report(
        manifest,
        results,
        against=manifest.reference_title,
        notes=[*notes, *(f"Deferred: {line}" for line in deferred)],
        inputs=inputs_of(cases),
    )


def parity_error(furthest: Comparison, bundle: Bundle, precision: str) -> ParityError:
    """Return the error of an export outside tolerance."""
    kept = bundle.path
    if (error := _error_of_pytorch(furthest, bundle)) is not None:
        return error
    return ParityError(
        f"Parity failed: expected an error of at most {furthest.bound:.0e}, got "
        f"{furthest.largest_error:.1e} for {subject_of(furthest)}, case {furthest.case!r}.",
        ("Try --precision fp32" if precision != "fp32" else "See parity.html in the bundle")
        + f". The bundle is kept at {kept} for inspection.",
    )


def _error_of_pytorch(furthest: Comparison, bundle: Bundle) -> ParityError | None:
    """Return the error for a case in which PyTorch itself gives NaN or infinity; else None."""
    # The bundle does not keep the case beyond 65,536 tokens.
    case = next((c for c in bundle.golden() if c.name == furthest.case), None)
    expected = None if case is None else case.outputs.get(furthest.output)
    if case is None or expected is None or np.isfinite(expected).all():
        return None
    got = "NaN" if np.isnan(expected).any() else "infinity"
    problem = f"Parity failed: PyTorch itself gives {got} for the case {case.name!r}"
    numbers = [extra for extra in bundle.manifest.extra_inputs if extra.dtype == "float32"]
    if not numbers:
        return ParityError(
            f"{problem}.",
            f"Make forward finite for every document. The bundle is kept at {bundle.path}.",
        )
    drawn = ", ".join(
        f"{extra.name} {extra.layout} from {case.inputs[extra.name].min():.3g} to "
        f"{case.inputs[extra.name].max():.3g}"
        for extra in numbers
    )
    return ParityError(
        f"{problem}, with the inputs {drawn}.",
        f"Declare the numbers that forward accepts, such as --input {numbers[0].name}=number:0..100"
        f"; or make forward finite for every number. The bundle is kept at {bundle.path}.",
    )


def print_tables(
    console: Console, bundle: Bundle, paths: dict[str, str], results: Sequence[Comparison]
) -> None:
    """Print the operators, the comparisons and the sizes of a bundle in full."""
    manifest = bundle.manifest
    console.print(operator_table(manifest.operators, paths))
    if results:
        console.print(parity_table(results, manifest.reference, name=manifest.reference_name))
    print_meanings(console, manifest.heads)
    console.print(size_table(bundle.files))


def print_summary(
    console: Console, bundle: Bundle, paths: dict[str, str], results: Sequence[Comparison]
) -> None:
    """Print the verdict, the operators, the answers, the engine and the gaps of a bundle."""
    manifest = bundle.manifest
    report = Report(manifest, results)
    if not report.passed and results:
        outside = [result for result in results if not result.passed]
        console.print(parity_table(outside, manifest.reference, name=manifest.reference_name))
        return  # the error has the verdict
    color = "green" if results else "yellow"
    lines = [
        f"[{color}]{report.verdict}.[/] {escape(report.reason)}",
        f"Operators: {operators_sentence(bundle, paths)}.",
        *(f"Answers: {escape(_answer(name, bundle))}." for name in manifest.heads),
        *(f"[yellow]{escape(gap)}[/]" for gap in gaps(bundle)),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    if plan := manifest.engine:
        show_engine(plan, bundle.path, console)


def print_place(console: Console, bundle: Bundle) -> None:
    """Print the path and the size of a bundle, and the command that serves it."""
    size = size_text(sum(bundle.files.values()))
    for line in (
        f"Bundle: [bold]{escape(str(bundle.path))}[/], {size}",
        f"Next: {escape(next_command(bundle))}",
    ):
        console.print(line, soft_wrap=True)


_SHOWN_LABELS = 8


def _answer(name: str, bundle: Bundle) -> str:
    """Return the task of a head and the names of its numbers, as far as they fit a line."""
    head = bundle.manifest.heads[name]
    place = "" if len(bundle.manifest.heads) == 1 else f"{name}, "
    if not head.is_named:
        return f"{place}{head.task} of {len(head.names):,} numbers"
    more = len(head.names) - _SHOWN_LABELS
    shown = ", ".join(head.names[:_SHOWN_LABELS]) + f" and {more:,} more" * (more > 0)
    return f"{place}{head.task} of {shown}"


def export_notes(
    traced: TracedModel, products: ProductShares | None, *, batching: bool
) -> list[str]:
    """Return notes on unexpected properties of the export, one sentence each."""
    notes = [] if products is None else [f"Precision of products: {products}."]
    if not batching:
        notes.append("Each document runs separately (--no-batching).")
    if traced.left_out:
        notes.append(
            f"Left out, at its default: {', '.join(traced.left_out)}. The model is exported for "
            "documents without padding."
            if "lengths" not in traced.spec.names
            else f"Left out, at its default: {', '.join(traced.left_out)}. Only lengths marks the "
            "padding."
        )
    if traced.is_of_onnx:
        notes += _notes_of_onnx(traced)
    elif traced.why_not_float64:
        notes.append(
            f"PyTorch ran in {traced.reference}, because the model's forward does not run in "
            f"float64 ({traced.why_not_float64}). So every error includes PyTorch's rounding."
        )
    if traced.precision == "fp16" and traced.spec.max_tokens == MAX_FLOAT16:
        notes.append(
            f"Documents of more than {MAX_FLOAT16} tokens were not compared, because their cost is "
            "too high or the model's own positions are in 16 bits. So they are refused."
        )
    if count := count_softmax_attention(traced.lowered):
        notes.append(
            f"Softmax attentions run in standard operators (here {count}): their time grows with "
            "the square of the tokens, and their memory too, unless they run in blocks."
            + (
                " The server accepts documents of any length: give --max-length."
                if traced.spec.max_tokens is None
                else ""
            )
        )
    return notes


def _notes_of_onnx(traced: TracedModel) -> list[str]:
    reason = f" ({traced.why_not_float64})" if traced.why_not_float64 else ""
    notes = [
        "There is no PyTorch to compare with: the reference is the ONNX file itself, run by ONNX "
        f"Runtime in {traced.reference}{reason}."
    ]
    if "lengths" not in traced.spec.names:
        notes.append(
            "The file takes neither lengths nor attention_mask: documents of different lengths do "
            "not share a run."
        )
    for old, new in traced.renamed.items():
        notes.append(
            f"The output {old!r} has the name {new!r} in the bundle."
            if new
            else f"The output {old!r} is left out: it holds no floating-point numbers."
        )
    return notes
