"""The terminal table of a parity check."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from aftexport.heads import Head
from aftexport.parity import Comparison
from aftexport.system.console import escape, plain_table, shape_text
from aftexport.system.contract import LOGITS


def output_of(result: Comparison) -> str:
    """Return ``output NAME`` if the model names the output; else an empty text."""
    is_named = _is_of_model(result) and result.output != LOGITS
    return f"output {result.output}" if is_named else ""


def _is_of_model(result: Comparison) -> bool:
    """Return whether the model was run, rather than one operator, whose output has no name."""
    return result.subject.startswith("model")


def subject_of(result: Comparison) -> str:
    """Return the subject of a comparison, with the output if the model names it."""
    return ", ".join(filter(None, (result.subject, output_of(result))))


def meanings_of(heads: Mapping[str, Head]) -> str:
    """Return the meaning of the scores, with the names of several heads."""
    if len(heads) == 1:
        (head,) = heads.values()
        return head.meaning
    return "; ".join(f"{name}: {head.meaning}" for name, head in heads.items())


def print_meanings(console: Console, heads: Mapping[str, Head]) -> None:
    """Print the meaning of the scores of each head."""
    console.print(f"Scores: {escape(meanings_of(heads))}.")


def parity_table(results: Sequence[Comparison], reference: str, *, name: str = "PyTorch") -> Table:
    """Return a table of each case's error and bound.

    Args:
        results: the comparisons.
        reference: the type of the reference.
        name: the model that is the reference.
    """
    outputs = {result.output for result in results if _is_of_model(result)}
    named = ["output"] if len(outputs) > 1 else []
    columns = ("input", "error", "bound", "ulps", "flips", "")
    table = plain_table(f"parity with {name}", *named, *columns)
    formula = "max |output - reference| / max(1, max |reference|)"
    table.caption = f"error: {formula}, {reference} reference, or that of the scores if larger"
    table.caption_justify = "left"
    for result in results:
        verdict = "[green]within[/]" if result.passed else "[bold red]OUTSIDE[/]"
        subject = result.case if result.subject == "model" else f"{result.subject}, {result.case}"
        if result.engine != "onnxruntime":
            subject += f", {result.engine}"
        numbers = (f"{result.largest_error:.1e}", f"{result.bound:.0e}", f"{result.max_ulps:.0f}")
        flips = str(result.label_flips) if _is_of_model(result) else ""
        output = [result.output if _is_of_model(result) else ""] if named else []
        table.add_row(escape(subject), *output, shape_text(result.shape), *numbers, flips, verdict)
    return table
