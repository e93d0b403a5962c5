"""The terminal table of a parity check."""

from collections.abc import Sequence

from rich.table import Table

from aftexport.console import escape, plain_table, shape_text
from aftexport.parity import Comparison


def parity_table(results: Sequence[Comparison], reference: str) -> Table:
    """Return a table of each case's error and bound; ``reference`` is the type of PyTorch."""
    table = plain_table("parity with PyTorch", "input", "error", "bound", "ulps", "flips", "")
    formula = "max |output - reference| / max(1, max |reference|)"
    table.caption = f"error: {formula}, {reference} reference, or that of the scores if larger"
    table.caption_justify = "left"
    for result in results:
        verdict = "[green]within[/]" if result.passed else "[bold red]OUTSIDE[/]"
        subject = result.case if result.subject == "model" else f"{result.subject}, {result.case}"
        if result.engine != "onnxruntime":
            subject += f", {result.engine}"
        numbers = (f"{result.largest_error:.1e}", f"{result.bound:.0e}", f"{result.max_ulps:.0f}")
        flips = str(result.label_flips) if result.subject.startswith("model") else ""
        table.add_row(escape(subject), shape_text(result.shape), *numbers, flips, verdict)
    return table
